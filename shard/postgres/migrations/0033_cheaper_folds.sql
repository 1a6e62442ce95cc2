-- LOCKS ACCESS EXCLUSIVE: workflow_arrival, workflow_node
-- READS: workflow_arrival, workflow_node
-- Folds of workflows write less (docs/decisions/0054-ends-of-nodes-are-appended-and-folded.md).

-- The arrivals come first: the transactions that end jobs lock them before they lock the nodes.
ALTER TABLE windrow.workflow_arrival
    -- The end of each job would read this condition anew. The state of the node has it, too.
    DROP CONSTRAINT workflow_arrival_how_check,
    -- Whether it is the first arrival of its transaction: only for this one the fold runs at the commit. The default is
    -- for transactions that have begun with the note_end of before; a superfluous run of the trigger finds nothing to do.
    ADD COLUMN is_first boolean NOT NULL DEFAULT true;
DROP TRIGGER workflow_fold ON windrow.workflow_arrival;
CREATE CONSTRAINT TRIGGER workflow_fold AFTER INSERT ON windrow.workflow_arrival DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (NEW.is_first) EXECUTE FUNCTION windrow.fold_at_commit();
-- One index instead of two.
ALTER TABLE windrow.workflow_arrival
    DROP CONSTRAINT workflow_arrival_pkey, ADD PRIMARY KEY (org_id, workflow, number);
DROP INDEX windrow.workflow_arrival_of;

-- Room for new versions of a row beside it: an end changes no column of an index.
ALTER TABLE windrow.workflow_node SET (fillfactor = 70);
-- Whether a fold has left work: the job of the node is still to be released or cancelled. An index on the state itself
-- would have to be written whenever the state changes. Postgres computes the column, so it is right whatever release
-- writes the state.
ALTER TABLE windrow.workflow_node
    ADD COLUMN is_left boolean NOT NULL GENERATED ALWAYS AS (state IN ('due', 'doomed')) STORED;
CREATE INDEX workflow_node_left ON windrow.workflow_node (flow) WHERE is_left;
DROP INDEX windrow.workflow_node_due;

DROP FUNCTION IF EXISTS windrow.pass_on_ends;
-- INSTALL functions/note_end.sql 8f795a1d951a051707cf1a4b0fb1c20d578fcea1177160d396a4d00765bc0e9a
-- INSTALL functions/fold_workflows.sql 859ec62b064a1db88061859034e003c219aa9097981d9b239cf0ac87227097ff
-- INSTALL functions/fold_portion.sql 7c73141cf2a121bac27ffacbdf5eed0defcf85b44625f1508be6a1e18f916f80
-- INSTALL functions/fold_more.sql 9d11ed8f1826f2b3a025103a6ff1fe3284e7fd0ce9d2e05dfbc478142a5ba588
-- INSTALL functions/pass_on_ends.sql 48418e91b6ddb7de86c2b7676a899f7ca497d46b02356c4fc35f462ecd263287
-- INSTALL functions/append_untold.sql 2183e2e320057b615394617aea3775011395915536d24835fb2a6d8e04ee68cd
-- INSTALL functions/doom_cancelled.sql 4ee0024eb599bf39a975c437fb32bb77c8981dba40f3a05b51fa0a2733188791
