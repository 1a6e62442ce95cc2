-- Returns the runs of a schedule at these instants.
SELECT r.at, r.cause, r.outcome, r.through, r.skipped_for, r.job_id::text, r.decided_at
FROM unnest(%(ats_us)s::bigint[]) AS n (at_us)
JOIN windrow.schedule_run r
    ON r.schedule_id = %(id)s::uuid AND r.at = timestamptz 'epoch' + n.at_us * interval '1 us'
