-- Adds read calls to the audit log. Each minute has one row for each caller, method and outcome, which counts the
-- calls.
INSERT INTO windrow.audit AS a (id, principal, peer, method, ended_at, outcome, calls, minute)
SELECT gen_random_uuid(), e.principal, e.peer, e.method, now(), e.outcome, e.calls, (extract(epoch FROM now()) / 60)::bigint
FROM jsonb_to_recordset(%(reads)s::jsonb) AS e (principal text, peer text, method text, outcome text, calls bigint)
ON CONFLICT (minute, method, principal, peer, outcome) WHERE minute IS NOT NULL DO UPDATE
SET calls = a.calls + excluded.calls, ended_at = excluded.ended_at
