-- Quarantines a kind whose jobs have crashed. Forgets the crashes of all kinds of its org, because jobs of other kinds
-- may have crashed only because they were leased to the same workers. Quarantines nothing if the org already has the
-- maximum number of quarantined kinds.
WITH forgotten AS (
    DELETE FROM windrow.crash c
    WHERE {{org_of(c)}} = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
)
INSERT INTO windrow.quarantine (queue_id, kind, crashes, next_trial_at, pause_s)
SELECT q.queue_id, %(kind)s, %(crashes)s, now() + %(pause_s)s * interval '1 s', %(pause_s)s
FROM windrow.queue q
JOIN windrow.owned_slot o ON o.slot = q.slot AND o.state = 'owned'
WHERE q.queue_id = %(queue_id)s AND q.org = %(org)s AND q.quarantine_after IS NOT NULL
    AND {{may_quarantine(q)}}
ON CONFLICT (queue_id, kind) DO NOTHING
RETURNING kind
