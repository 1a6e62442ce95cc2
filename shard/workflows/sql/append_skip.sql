-- Appends that a node was skipped. The caller folds the workflow.
INSERT INTO windrow.workflow_arrival (org_id, workflow, node, how)
VALUES (%(org_id)s, %(id)s::uuid, %(node)s, 'skipped')
