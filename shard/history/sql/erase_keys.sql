-- Erases what is remembered about the jobs of an org that is being erased: dedup keys, and ids of dropped jobs.
WITH keys AS (
    DELETE FROM windrow.dedup d USING windrow.queue q WHERE q.org = chr(127) || %(org_id)s::integer::text AND d.queue_id = q.queue_id
    RETURNING 1
), ids AS (
    DELETE FROM windrow.past_id p WHERE p.org_id = %(org_id)s
    RETURNING 1
)
UPDATE windrow.erasure e
SET dedup_keys = e.dedup_keys + (SELECT count(*) FROM keys), past_ids = e.past_ids + (SELECT count(*) FROM ids)
WHERE e.org_id = %(org_id)s AND e.ended_at IS NULL
