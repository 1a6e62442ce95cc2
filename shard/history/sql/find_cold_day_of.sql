-- Returns the first cold day that has jobs of this org according to the books, as its retention and its date.
SELECT a.retention, to_char(a.day, 'YYYY-MM-DD') FROM windrow.archived a WHERE a.org_id = %(org_id)s
ORDER BY a.day, a.retention
LIMIT 1
