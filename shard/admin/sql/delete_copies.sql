-- Deletes these jobs of an org if they are live or dead on this shard. Another shard has each of these jobs, too.
-- Returns how many jobs were deleted. Does not cancel the jobs: if the slot came back to this shard, a lookup would
-- find the record of the cancelled job instead of the job itself.
WITH live AS (
    DELETE FROM windrow.job j
    WHERE j.id = ANY (%(ids)s::uuid[])
        AND {{org_of(j)}} = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
    RETURNING j.queue_id
), aside AS (
    DELETE FROM windrow.dead d
    WHERE d.id = ANY (%(ids)s::uuid[])
        AND {{org_of(d)}} = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
    RETURNING d.queue_id
), gone AS (
    SELECT live.queue_id FROM live UNION ALL SELECT aside.queue_id FROM aside
), forgotten AS (
    INSERT INTO windrow.tally (org_id, accepted)
    SELECT ({{org_of(g)}})::integer, -count(*) FROM gone g GROUP BY 1
)
SELECT count(*) FROM gone
