-- Returns the job that an earlier call of TriggerSchedule with this request id has stored.
SELECT r.job_id::text FROM windrow.schedule_run r WHERE r.schedule_id = %(id)s::uuid AND r.request = %(request)s::uuid
