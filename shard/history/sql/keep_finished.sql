-- For one day and these queues of an org, changes the retention of the finished jobs. Returns how many jobs had another
-- retention. The jobs move to another partition, so Postgres runs the triggers for new rows. The setting
-- windrow.history_moves tells these triggers that no job has ended now.
WITH moved AS (
    UPDATE windrow.finished f SET retention = n.days
    FROM unnest(%(queues)s::text[], %(days)s::smallint[]) AS n (queue, days)
    JOIN windrow.queue q ON q.org = %(org)s AND q.queue = n.queue
    WHERE f.queue_id = q.queue_id AND f.retention = %(retention)s AND n.days <> %(retention)s
        AND f.finished_at >= %(day)s::date::timestamp AT TIME ZONE 'UTC'
        AND f.finished_at < (%(day)s::date + 1)::timestamp AT TIME ZONE 'UTC'
        AND (SELECT set_config('windrow.history_moves', 'on', true)) = 'on'
    RETURNING 1
)
SELECT count(*) FROM moved
