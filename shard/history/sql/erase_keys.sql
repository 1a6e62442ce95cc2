-- Erases other rows of an org that is being erased: up to `rows` dedup keys, up to `wholes` schedules, and up to
-- `wholes` workflows. Schedules and workflows are erased with all of their rows. Returns how many keys, schedules and
-- workflows were erased.
WITH keys AS (
    DELETE FROM windrow.dedup d
    WHERE d.ctid = ANY (ARRAY(
        SELECT one.ctid
        FROM windrow.queue q
        JOIN windrow.dedup one ON one.queue_id = q.queue_id
        WHERE q.org = chr(127) || %(org_id)s::integer::text
        LIMIT %(rows)s
    ))
    RETURNING 1
), schedules AS (
    DELETE FROM windrow.schedule s
    WHERE s.id IN (SELECT one.id FROM windrow.schedule one WHERE one.org_id = %(org_id)s LIMIT %(wholes)s)
    RETURNING s.id
), runs AS (
    DELETE FROM windrow.schedule_run r USING schedules s WHERE r.schedule_id = s.id
), workflows AS (
    DELETE FROM windrow.workflow w
    WHERE w.flow IN (SELECT one.flow FROM windrow.workflow one WHERE one.org_id = %(org_id)s LIMIT %(wholes)s)
    RETURNING w.flow
), nodes AS (
    DELETE FROM windrow.workflow_node n USING workflows w WHERE n.flow = w.flow
), edges AS (
    DELETE FROM windrow.workflow_edge e USING workflows w WHERE e.flow = w.flow
), arrivals AS (
    DELETE FROM windrow.workflow_arrival a WHERE a.org_id = %(org_id)s
), noted AS (
    UPDATE windrow.erasure e SET dedup_keys = e.dedup_keys + (SELECT count(*) FROM keys)
    WHERE e.org_id = %(org_id)s AND e.ended_at IS NULL
)
SELECT (SELECT count(*) FROM keys) + (SELECT count(*) FROM schedules) + (SELECT count(*) FROM workflows)
