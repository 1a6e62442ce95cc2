-- Returns a page of an org's schedules by name, without the payloads of their jobs, and the present time. The page ends
-- with the schedule whose attributes fill `bytes_max`. `found`: how many schedules the page would have without this
-- limit.
SELECT {{schedule_record(s)}}, s.org, NULL::bytea AS payload, now() AS now, s.found
FROM (
    SELECT
        l.*,
        count(*) OVER () AS found,
        sum(coalesce(octet_length(l.attributes::text), 0)) OVER (
            ORDER BY l.name ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS bytes_before
    FROM (
        SELECT s.*, o.org
        FROM windrow.org o
        JOIN windrow.schedule s ON s.org_id = o.org_id
        WHERE o.org = %(org)s AND s.name > %(after)s
            AND (%(declared_by)s::text = '' OR s.declared_by = %(declared_by)s::text)
        ORDER BY s.name
        LIMIT %(rows)s
    ) l
) s
WHERE coalesce(s.bytes_before, 0) < %(bytes_max)s
ORDER BY s.name
