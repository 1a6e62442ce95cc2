-- Deletes the schedules of the orgs of those of these slots that have this state since this epoch: of slots that drain,
-- when the target has them; of slots that have just arrived, what an earlier stay has left.
WITH gone AS (
    DELETE FROM windrow.schedule s
    USING windrow.org o, windrow.owned_slot w
    WHERE s.org_id = o.org_id AND o.slot = w.slot
        AND w.slot = ANY (%(slots)s::smallint[]) AND w.state = %(state)s AND w.epoch = %(epoch)s
    RETURNING s.id
)
DELETE FROM windrow.schedule_run r USING gone WHERE r.schedule_id = gone.id
