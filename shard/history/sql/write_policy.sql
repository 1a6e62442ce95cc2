-- Sets an org's policy. If the org is under legal hold already, the hold keeps its start time.
INSERT INTO windrow.policy AS p (org, retention, held_since, held_for)
VALUES (%(org)s, %(retention)s::smallint, CASE WHEN %(held_for)s::text IS NOT NULL THEN now() END, %(held_for)s::text)
ON CONFLICT (org) DO UPDATE SET
    retention = excluded.retention,
    held_since = CASE WHEN excluded.held_for IS NOT NULL THEN coalesce(p.held_since, excluded.held_since) END,
    held_for = excluded.held_for
