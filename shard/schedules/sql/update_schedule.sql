-- Gives a new configuration to a schedule. The caller must have locked the schedule.
UPDATE windrow.schedule s
SET ({{schedule_spec}}, {{template_columns}}, next_at, wake_at, paused_at) = (
    SELECT
        {{schedule_spec_values}}, {{template_values}},
        timestamptz 'epoch' + %(next_us)s::bigint * interval '1 us',
        timestamptz 'epoch' + %(wake_us)s::bigint * interval '1 us',
        timestamptz 'epoch' + %(paused_us)s::bigint * interval '1 us'
)
WHERE s.id = %(id)s::uuid
RETURNING s.id::text
