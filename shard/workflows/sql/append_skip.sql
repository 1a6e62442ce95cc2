-- Appends the end of a node that was skipped. Afterwards, the caller must fold the workflow.
INSERT INTO windrow.workflow_arrival (org_id, workflow, node, how)
VALUES (%(org_id)s, %(id)s::uuid, %(node)s, 'skipped')
