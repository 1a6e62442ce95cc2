-- Returns the positions, in the given arrays, of the instants at which the schedule already has a run.
SELECT n.position
FROM unnest(%(schedules)s::uuid[], %(ats_us)s::bigint[]) WITH ORDINALITY AS n (schedule_id, at_us, position)
JOIN windrow.schedule_run r
    ON r.schedule_id = n.schedule_id AND r.at = timestamptz 'epoch' + n.at_us * interval '1 us'
