-- Stores schedules that come with their orgs from another shard. On this shard, the orgs have other numbers.
INSERT INTO windrow.schedule (
    id, org_id, name, {{schedule_spec}}, {{template_columns}}, created_at, paused_at, next_at, wake_at, last_at, last_job,
    buffered, decided
)
SELECT
    s.id, o.org_id, s.name, {{schedule_spec(s)}}, {{template_columns(s)}}, s.created_at, s.paused_at, s.next_at, s.wake_at,
    s.last_at, s.last_job, s.buffered, s.decided
FROM unnest(%(orgs)s::text[], %(rows)s::text[]) AS n (org, rows)
CROSS JOIN LATERAL (SELECT o.org_id FROM windrow.org o WHERE o.org = n.org OFFSET 0) o
CROSS JOIN LATERAL unnest(n.rows::windrow.schedule[]) s
