-- Deletes the schedules of the orgs of these slots. Leaves out slots that do not have this state and this epoch. For
-- draining slots, run this statement when the target has the schedules. For slots that have just arrived, this
-- statement deletes rows from an earlier time at which this shard had these slots.
WITH gone AS (
    DELETE FROM windrow.schedule s
    USING windrow.org o, windrow.owned_slot w
    WHERE s.org_id = o.org_id AND o.slot = w.slot
        AND w.slot = ANY (%(slots)s::smallint[]) AND w.state = %(state)s AND w.epoch = %(epoch)s
    RETURNING s.id
)
DELETE FROM windrow.schedule_run r USING gone WHERE r.schedule_id = gone.id
