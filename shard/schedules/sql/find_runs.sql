-- Returns those of these instants for which the schedule has a run.
SELECT r.at
FROM unnest(%(ats_us)s::bigint[]) AS n (at_us)
JOIN windrow.schedule_run r
    ON r.schedule_id = %(id)s::uuid AND r.at = timestamptz 'epoch' + n.at_us * interval '1 us'
