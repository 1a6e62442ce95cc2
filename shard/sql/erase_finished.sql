-- Erases the finished jobs of an org that is being erased, and strikes them from the books. Answers how many. They are in days
-- that are not over long: looked through once.
WITH gone AS (
    DELETE FROM windrow.finished f
    USING windrow.queue q
    WHERE q.org = chr(127) || %(org_id)s::integer::text AND f.queue_id = q.queue_id
    RETURNING 1
), struck AS (
    INSERT INTO windrow.tally (org_id, accepted) SELECT %(org_id)s, -count(*) FROM gone HAVING count(*) > 0
), noted AS (
    UPDATE windrow.erasure e SET finished = e.finished + (SELECT count(*) FROM gone)
    WHERE e.org_id = %(org_id)s AND e.ended_at IS NULL
)
SELECT count(*) FROM gone
