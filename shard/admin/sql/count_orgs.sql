-- Counts every org's jobs, unless they were counted within the last max_age_us. A second session that runs this at the
-- same time waits for the first one, and then counts nothing. Only rows that change are written.
WITH due AS (
    INSERT INTO windrow.org_figures_counted AS c (at) VALUES (now())
    ON CONFLICT (only_row) DO UPDATE SET at = now() WHERE c.at <= now() - %(max_age_us)s * interval '1 us'
    RETURNING c.at
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
        -- Until it is deleted here, an exported job counts in its state before the export.
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
), counted AS MATERIALIZED (
    SELECT
        org_id, coalesce(live.scheduled, 0) AS scheduled, coalesce(live.ready, 0) AS ready,
        coalesce(live.leased, 0) AS leased, coalesce(aside.dead, 0) AS dead, live.oldest_ready_us
    FROM live
    FULL JOIN aside USING (org_id)
), gone AS (
    DELETE FROM windrow.org_figures f
    WHERE EXISTS (SELECT FROM due) AND NOT EXISTS (SELECT FROM counted c WHERE c.org_id = f.org_id)
)
INSERT INTO windrow.org_figures AS f (org_id, scheduled, ready, leased, dead, oldest_ready_us)
SELECT c.org_id, c.scheduled, c.ready, c.leased, c.dead, c.oldest_ready_us FROM counted c
ON CONFLICT (org_id) DO UPDATE
SET
    scheduled = excluded.scheduled, ready = excluded.ready, leased = excluded.leased, dead = excluded.dead,
    oldest_ready_us = excluded.oldest_ready_us
WHERE (f.scheduled, f.ready, f.leased, f.dead) <> (excluded.scheduled, excluded.ready, excluded.leased, excluded.dead)
    OR f.oldest_ready_us IS DISTINCT FROM excluded.oldest_ready_us
