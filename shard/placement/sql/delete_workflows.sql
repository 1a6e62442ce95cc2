-- Deletes the workflows of the orgs of these slots. Leaves out slots that do not have this state and this epoch: see
-- delete_schedules.sql.
WITH gone AS (
    DELETE FROM windrow.workflow w
    USING windrow.org o, windrow.owned_slot s
    WHERE w.org_id = o.org_id AND o.slot = s.slot
        AND s.slot = ANY (%(slots)s::smallint[]) AND s.state = %(state)s AND s.epoch = %(epoch)s
    RETURNING w.flow
), nodes AS (
    DELETE FROM windrow.workflow_node n USING gone WHERE n.flow = gone.flow
)
DELETE FROM windrow.workflow_edge e USING gone WHERE e.flow = gone.flow
