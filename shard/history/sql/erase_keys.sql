-- Erases the other rows of an org that is being erased: its schedules, workflows, dedup keys, and ids of dropped jobs.
WITH keys AS (
    DELETE FROM windrow.dedup d USING windrow.queue q WHERE q.org = chr(127) || %(org_id)s::integer::text AND d.queue_id = q.queue_id
    RETURNING 1
), ids AS (
    DELETE FROM windrow.past_id p WHERE p.org_id = %(org_id)s
    RETURNING 1
), schedules AS (
    DELETE FROM windrow.schedule s WHERE s.org_id = %(org_id)s RETURNING s.id
), runs AS (
    DELETE FROM windrow.schedule_run r USING schedules s WHERE r.schedule_id = s.id
), workflows AS (
    DELETE FROM windrow.workflow w WHERE w.org_id = %(org_id)s RETURNING w.flow
), nodes AS (
    DELETE FROM windrow.workflow_node n USING workflows w WHERE n.flow = w.flow
), edges AS (
    DELETE FROM windrow.workflow_edge e USING workflows w WHERE e.flow = w.flow
), arrivals AS (
    DELETE FROM windrow.workflow_arrival a WHERE a.org_id = %(org_id)s
)
UPDATE windrow.erasure e
SET dedup_keys = e.dedup_keys + (SELECT count(*) FROM keys), past_ids = e.past_ids + (SELECT count(*) FROM ids)
WHERE e.org_id = %(org_id)s AND e.ended_at IS NULL
