-- Records in the audit log how several changes ended.
UPDATE windrow.audit AS a
SET ended_at = now(), outcome = e.outcome, counts = e.counts
FROM jsonb_to_recordset(%(ends)s::jsonb) AS e (id uuid, outcome text, counts jsonb)
WHERE a.id = e.id AND a.ended_at IS NULL
