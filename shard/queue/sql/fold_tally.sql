-- Folds the tally into one row for each org. A second session that runs this statement at the same time waits until the
-- rows are deleted, and then folds nothing.
WITH folded AS (
    DELETE FROM windrow.tally RETURNING org_id, accepted
)
INSERT INTO windrow.tally (org_id, accepted)
SELECT folded.org_id, sum(folded.accepted) FROM folded GROUP BY folded.org_id
