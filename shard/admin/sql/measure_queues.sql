-- Counts every queue's jobs, unless they were counted within the last `max_age_us` microseconds. Keeps the figures of
-- each of the `named_max` largest queues, and the sums of all other queues. One org gets more than `share` of these
-- `named_max` queues only if the other orgs have too few queues. A second session that runs this statement at the same
-- time waits for the first session, and then counts nothing. In that session `due` has no row, and Postgres computes
-- `figures` only for a row that is changed.
WITH due AS MATERIALIZED (
    -- Lock first. An UPDATE alone would compute `figures` before it waits for the row. If the time of the last count is
    -- in the future, the clock was set back after that count.
    SELECT c.at
    FROM windrow.queue_figures c
    WHERE c.at <= now() - %(max_age_us)s * interval '1 us' OR c.at > now()
    FOR UPDATE
)
UPDATE windrow.queue_figures c
SET
    at = now(),
    figures = (
        WITH live AS (
            SELECT
                j.queue_id,
                count(*) FILTER (WHERE ({{is_later(j)}} OR {{is_blocked(j)}}) AND j.lease IS NULL) AS scheduled,
                count(*) FILTER (WHERE {{is_due(j)}}) AS ready,
                count(*) FILTER (WHERE j.visible_at > now() AND j.lease IS NOT NULL) AS leased,
                min(j.visible_at) FILTER (WHERE j.visible_at <= now()) AS oldest
            FROM windrow.job j
            GROUP BY 1
        ), aside AS (
            SELECT d.queue_id, count(*) AS dead FROM windrow.dead d GROUP BY 1
        ), counted AS (
            SELECT
                queue_id, coalesce(live.scheduled, 0) AS scheduled, coalesce(live.ready, 0) AS ready,
                coalesce(live.leased, 0) AS leased, coalesce(aside.dead, 0) AS dead, live.oldest
            FROM live
            FULL JOIN aside USING (queue_id)
        ), sized AS (
            SELECT
                k.*, k.scheduled + k.ready + k.leased + k.dead AS jobs,
                -- Jobs of a paused queue are not late.
                CASE WHEN {{gives_jobs(q)}} THEN extract(epoch FROM now() - k.oldest) END AS oldest_s,
                q.org_id
            FROM counted k
            JOIN windrow.queue q ON q.queue_id = k.queue_id
        ), shares AS (
            SELECT
                z.*, row_number() OVER (PARTITION BY z.org_id ORDER BY z.jobs DESC, z.queue_id) <= %(share)s AS within
            FROM sized z
        ), ranked AS (
            -- The queues of an org that exceed its share come last. Otherwise one org with many queues could hide the
            -- queues of all other orgs.
            SELECT h.*, row_number() OVER (ORDER BY h.within DESC, h.jobs DESC, h.queue_id) <= %(named_max)s AS named
            FROM shares h
        )
        SELECT coalesce(jsonb_agg(f.figures ORDER BY f.queue_id), '[]')
        FROM (
            SELECT
                CASE WHEN r.named THEN r.queue_id END AS queue_id,
                jsonb_build_array(
                    CASE WHEN r.named THEN r.queue_id END, sum(r.scheduled), sum(r.ready), sum(r.leased), sum(r.dead),
                    max(r.oldest_s)
                ) AS figures
            FROM ranked r
            GROUP BY CASE WHEN r.named THEN r.queue_id END
        ) f
    )
FROM due
-- Change nothing if this session has waited for another count: `c` is then the older version of the row.
WHERE c.at = due.at
