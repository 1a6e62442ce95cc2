-- Counts every org's jobs, unless they were counted within the last `max_age_us` microseconds. A second session that
-- runs this statement at the same time waits for the first session, and then counts nothing. Only rows that change are
-- written.
--
-- A job that this shard has accepted, and that is neither live nor dead on this shard any more, has finished. So two
-- counts show how many jobs were stored between them, and how many jobs finished (the column `ended`). An org has a row
-- as soon as the shard has accepted a job of the org.
WITH due AS (
    INSERT INTO windrow.org_figures_counted AS c (at, accepted_at) VALUES (now(), now())
    ON CONFLICT (only_row) DO UPDATE
    SET at = now(), accepted_at = now(), before = CASE WHEN c.accepted_at = c.at AND c.at < now() THEN c.at END
    -- If the time of the last count is in the future, the clock was set back after that count.
    WHERE (c.at <= now() - %(max_age_us)s * interval '1 us' OR c.at > now())
        -- Do not count again if this session has waited for another count: its snapshot does not have the figures of
        -- the other count.
        AND c.at = (SELECT seen.at FROM windrow.org_figures_counted seen)
    RETURNING c.before
), live AS (
    SELECT
        {{org_of(j)}} AS org_id,
        count(*) FILTER (WHERE ({{is_later(j)}} OR {{is_blocked(j)}}) AND j.lease IS NULL) AS scheduled,
        count(*) FILTER (WHERE {{is_due(j)}}) AS ready,
        count(*) FILTER (WHERE j.visible_at > now() AND j.lease IS NOT NULL) AS leased,
        (extract(epoch FROM min(j.visible_at) FILTER (WHERE j.visible_at <= now())) * 1000000)::bigint AS oldest_ready_us
    FROM (
        SELECT j.queue_id, j.visible_at, j.lease, j.run_at FROM windrow.job j
        UNION ALL
        -- An exported job counts in the state that it had before the export, until this shard deletes it.
        SELECT d.queue_id, d.run_at, NULL, d.run_at FROM windrow.departing d WHERE d.reason IS NULL
    ) j
    WHERE EXISTS (SELECT FROM due)
    GROUP BY 1
), aside AS (
    SELECT {{org_of(d)}} AS org_id, count(*) AS dead
    FROM (
        SELECT d.queue_id FROM windrow.dead d
        UNION ALL
        SELECT d.queue_id FROM windrow.departing d WHERE d.reason IS NOT NULL
    ) d
    WHERE EXISTS (SELECT FROM due)
    GROUP BY 1
), granted AS (
    SELECT t.org_id::bigint AS org_id, sum(t.accepted)::bigint AS accepted
    FROM windrow.tally t
    WHERE EXISTS (SELECT FROM due)
    GROUP BY 1
    HAVING sum(t.accepted) <> 0
), counted AS MATERIALIZED (
    SELECT
        org_id, coalesce(live.scheduled, 0) AS scheduled, coalesce(live.ready, 0) AS ready,
        coalesce(live.leased, 0) AS leased, coalesce(aside.dead, 0) AS dead, live.oldest_ready_us,
        coalesce(granted.accepted, 0) AS accepted
    FROM live
    FULL JOIN aside USING (org_id)
    FULL JOIN granted USING (org_id)
), gone AS (
    DELETE FROM windrow.org_figures f
    WHERE EXISTS (SELECT FROM due) AND NOT EXISTS (SELECT FROM counted c WHERE c.org_id = f.org_id)
)
INSERT INTO windrow.org_figures AS f (
    org_id, scheduled, ready, leased, dead, oldest_ready_us, accepted, enqueued, ended
)
SELECT
    c.org_id, c.scheduled, c.ready, c.leased, c.dead, c.oldest_ready_us, c.accepted,
    -- The result is never negative. The difference itself is negative after jobs have moved to another shard, where
    -- they now count as accepted.
    CASE WHEN due.before IS NULL THEN 0 ELSE greatest(0, c.accepted - coalesce(o.accepted, 0)) END,
    CASE
        WHEN due.before IS NULL THEN 0
        ELSE greatest(
            0,
            c.accepted - c.scheduled - c.ready - c.leased - c.dead
            - coalesce(o.accepted - o.scheduled - o.ready - o.leased - o.dead, 0)
        )
    END
FROM due
CROSS JOIN counted c
LEFT JOIN windrow.org_figures o USING (org_id)
ON CONFLICT (org_id) DO UPDATE
SET
    scheduled = excluded.scheduled, ready = excluded.ready, leased = excluded.leased, dead = excluded.dead,
    oldest_ready_us = excluded.oldest_ready_us, accepted = excluded.accepted, enqueued = excluded.enqueued,
    ended = excluded.ended
WHERE (f.scheduled, f.ready, f.leased, f.dead, f.accepted, f.enqueued, f.ended) <> (
        excluded.scheduled, excluded.ready, excluded.leased, excluded.dead, excluded.accepted, excluded.enqueued,
        excluded.ended
    )
    OR f.oldest_ready_us IS DISTINCT FROM excluded.oldest_ready_us
