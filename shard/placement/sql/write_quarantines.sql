-- Stores quarantines that come with their orgs from another shard. On this shard, the queues have other numbers. Run
-- delete_quarantines.sql first, because this shard may have rows from an earlier time at which it had these orgs.
INSERT INTO windrow.quarantine (
    queue_id, kind, since, crashes, reason, next_trial_at, pause_s, trial_id, trial_at
)
SELECT q.queue_id, k.kind, k.since, k.crashes, k.reason, k.next_trial_at, k.pause_s, k.trial_id, k.trial_at
FROM unnest(%(orgs)s::text[], %(queues)s::text[], %(rows)s::text[]) AS n (org, queue, rows)
CROSS JOIN LATERAL (
    SELECT q.queue_id FROM windrow.queue q WHERE q.org = n.org AND q.queue = n.queue OFFSET 0
) q
CROSS JOIN LATERAL unnest(n.rows::windrow.quarantine[]) k
