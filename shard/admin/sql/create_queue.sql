-- Creates a queue with the given settings, or lists a deleted queue again. The rows of the queue's org and of its name
-- must exist. Returns no row, and changes nothing, in three cases: the queue exists and is listed; one of these rows
-- does not exist any more; this shard does not own the slot, or owns it only since an epoch that is later than the
-- caller's.
WITH made AS (
    INSERT INTO windrow.queue AS q (name_id, org_id, org, queue, slot, org_retention, {{setting_columns}})
    SELECT n.name_id, o.org_id, o.org, n.queue, o.slot, o.retention, {{new_settings}}
    FROM windrow.org o
    JOIN windrow.queue_name n ON n.queue = %(queue)s
    JOIN windrow.owned_slot s ON s.slot = o.slot
    WHERE o.org = %(org)s AND s.state = 'owned' AND s.epoch <= %(epoch)s
    -- For FOR SHARE, see insert_queues.sql.
    FOR SHARE OF o
    ON CONFLICT DO NOTHING
    RETURNING q.queue, q.created_at, {{effective_settings(q)}}
), relisted AS (
    UPDATE windrow.queue AS q
    SET {{altered_settings(q)}}, listed = true
    FROM windrow.owned_slot s
    WHERE q.org = %(org)s AND q.queue = %(queue)s AND NOT q.listed
        AND s.slot = q.slot AND s.state = 'owned' AND s.epoch <= %(epoch)s
    RETURNING q.queue, q.created_at, {{effective_settings(q)}}
)
TABLE made UNION ALL TABLE relisted
