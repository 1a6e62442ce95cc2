-- Deletes a schedule and its runs, but not its jobs.
WITH gone AS (
    DELETE FROM windrow.schedule s
    USING windrow.org o, windrow.owned_slot w
    WHERE s.org_id = o.org_id AND w.slot = o.slot AND o.org = %(org)s AND s.name = %(name)s
        AND w.state = 'owned' AND w.epoch <= %(epoch)s
    RETURNING s.id
), runs AS (
    DELETE FROM windrow.schedule_run r USING gone WHERE r.schedule_id = gone.id
)
SELECT gone.id::text FROM gone
