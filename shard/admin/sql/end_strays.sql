-- Deletes stray jobs that were set aside here and that another shard has: those that were moved there (`brought`), and those
-- that were known there already (`known`). A second record of a job here would be found instead of the job itself once the
-- slot comes back. Returns how many of each were deleted.
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
