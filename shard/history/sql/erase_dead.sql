-- Erases up to `rows` dead jobs of an org that is being erased, and removes them from the books. Returns how many jobs
-- were erased.
WITH gone AS (
    DELETE FROM windrow.dead j
    WHERE j.ctid = ANY (ARRAY(
        SELECT one.ctid
        FROM windrow.queue q
        JOIN windrow.dead one ON one.queue_id = q.queue_id
        WHERE q.org = chr(127) || %(org_id)s::integer::text
        LIMIT %(rows)s
        -- Wait for running statements that use these rows. If such a statement moves a job, the job is erased later in
        -- its new table.
        FOR UPDATE OF one
    ))
    RETURNING 1
), struck AS (
    INSERT INTO windrow.tally (org_id, accepted) SELECT %(org_id)s, -count(*) FROM gone HAVING count(*) > 0
), noted AS (
    UPDATE windrow.erasure e SET dead = e.dead + (SELECT count(*) FROM gone) WHERE e.org_id = %(org_id)s AND e.ended_at IS NULL
)
SELECT count(*) FROM gone
