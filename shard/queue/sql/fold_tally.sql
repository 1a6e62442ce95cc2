-- Folds the tally into one row for each org. A second session that runs this at the same time waits for the deleted
-- rows, and then folds nothing.
WITH folded AS (
    DELETE FROM windrow.tally RETURNING org_id, accepted
)
INSERT INTO windrow.tally (org_id, accepted)
SELECT folded.org_id, sum(folded.accepted) FROM folded GROUP BY folded.org_id
