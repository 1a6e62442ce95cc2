-- Deletes stray jobs from this shard's table of exported jobs if another shard has them: the jobs that were moved there
-- (`brought`), and the jobs that the other shard knew already (`known`). If this shard kept a second record of a job,
-- and the slot came back to this shard, a lookup would find the second record instead of the job itself. Returns how
-- many jobs of `brought` and of `known` were deleted.
WITH ended AS (
    DELETE FROM windrow.departing d
    WHERE d.slot = %(slot)s AND d.id = ANY (%(brought)s::uuid[] || %(known)s::uuid[])
        AND {{org_of(d)}} = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
    RETURNING d.id, d.queue_id
), forgotten AS (
    INSERT INTO windrow.tally (org_id, accepted)
    SELECT ({{org_of(e)}})::integer, -count(*) FROM ended e GROUP BY 1
)
SELECT
    count(*) FILTER (WHERE e.id = ANY (%(brought)s::uuid[])) AS brought,
    count(*) FILTER (WHERE e.id <> ALL (%(brought)s::uuid[])) AS known
FROM ended e
