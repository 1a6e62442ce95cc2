-- Returns the job that a call of TriggerSchedule has stored before.
SELECT r.job_id::text FROM windrow.schedule_run r WHERE r.schedule_id = %(id)s::uuid AND r.request = %(request)s::uuid
