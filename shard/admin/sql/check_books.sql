-- Returns every org's books at one moment, from one snapshot: how many jobs were accepted, and in which states they are
-- now (invariant I5).
WITH live AS (
    SELECT
        {{org_of(j)}} AS org_id,
        count(*) FILTER (WHERE ({{is_later(j)}} OR {{is_blocked(j)}}) AND j.lease IS NULL) AS scheduled,
        count(*) FILTER (WHERE {{is_due(j)}}) AS ready,
        count(*) FILTER (WHERE j.visible_at > now() AND j.lease IS NOT NULL) AS leased
    FROM (
        SELECT j.queue_id, j.visible_at, j.lease, j.run_at FROM windrow.job j
        UNION ALL
        -- An exported job counts in the state that it had before the export, until this shard deletes it.
        SELECT d.queue_id, d.run_at, NULL, d.run_at FROM windrow.departing d WHERE d.reason IS NULL
    ) j
    GROUP BY 1
), aside AS (
    SELECT {{org_of(d)}} AS org_id, count(*) AS dead
    FROM (
        SELECT d.queue_id FROM windrow.dead d
        UNION ALL
        SELECT d.queue_id FROM windrow.departing d WHERE d.reason IS NOT NULL
    ) d
    GROUP BY 1
), done AS (
    SELECT
        {{org_of(f)}} AS org_id,
        count(*) FILTER (WHERE f.state = 'succeeded') AS succeeded,
        count(*) FILTER (WHERE f.state = 'cancelled') AS cancelled
    FROM windrow.finished f
    GROUP BY 1
), away AS (
    SELECT a.org_id::bigint AS org_id, sum(a.jobs)::bigint AS archived FROM windrow.archived a GROUP BY 1
), past AS (
    SELECT e.org_id::bigint AS org_id, e.jobs AS expired FROM windrow.expired e
), granted AS (
    SELECT t.org_id::bigint AS org_id, sum(t.accepted)::bigint AS accepted FROM windrow.tally t GROUP BY 1
)
SELECT
    -- Also show jobs of an org that has no row, because such jobs would be the worst finding.
    coalesce(o.org, 'unknown org ' || org_id) AS org,
    coalesce(granted.accepted, 0) AS accepted,
    coalesce(live.scheduled, 0) AS scheduled, coalesce(live.ready, 0) AS ready, coalesce(live.leased, 0) AS leased,
    coalesce(done.succeeded, 0) AS succeeded, coalesce(aside.dead, 0) AS dead, coalesce(done.cancelled, 0) AS cancelled,
    coalesce(away.archived, 0) AS archived, coalesce(past.expired, 0) AS expired
FROM granted
FULL JOIN live USING (org_id)
FULL JOIN aside USING (org_id)
FULL JOIN done USING (org_id)
FULL JOIN away USING (org_id)
FULL JOIN past USING (org_id)
LEFT JOIN windrow.org o USING (org_id)
ORDER BY 1
