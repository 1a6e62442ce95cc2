-- Stores a new schedule. Returns no row if the org already has a schedule of this name.
INSERT INTO windrow.schedule AS s (
    id, org_id, name, {{schedule_spec}}, {{template_columns}}, next_at, wake_at
)
VALUES (
    %(id)s::uuid, %(org_id)s::integer, %(name)s, {{schedule_spec_values}}, {{template_values}},
    timestamptz 'epoch' + %(next_us)s::bigint * interval '1 us', timestamptz 'epoch' + %(wake_us)s::bigint * interval '1 us'
)
ON CONFLICT (org_id, name) DO NOTHING
RETURNING s.id::text
