-- Erases up to `rows` finished jobs of an org that is being erased, and removes them from the books. Returns how many
-- jobs were erased. Scans the whole table `finished`, which has only the jobs of the last few days.
WITH gone AS (
    DELETE FROM windrow.finished f
    WHERE (f.tableoid, f.ctid) IN (
        SELECT one.tableoid, one.ctid
        FROM windrow.finished one
        JOIN windrow.queue q ON q.queue_id = one.queue_id
        WHERE q.org = chr(127) || %(org_id)s::integer::text
        LIMIT %(rows)s
    )
    RETURNING 1
), struck AS (
    INSERT INTO windrow.tally (org_id, accepted) SELECT %(org_id)s, -count(*) FROM gone HAVING count(*) > 0
), noted AS (
    UPDATE windrow.erasure e SET finished = e.finished + (SELECT count(*) FROM gone)
    WHERE e.org_id = %(org_id)s AND e.ended_at IS NULL
)
SELECT count(*) FROM gone
