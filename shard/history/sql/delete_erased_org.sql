-- Deletes the row of an erased org, whose queues are deleted already. Also deletes the org's rows in the tally, because
-- fold_tally.sql, which sums up the tally, may have added a row during the erasure. Also deletes the rows about the
-- org's consumers, quarantines and crashes.
WITH folded AS (
    DELETE FROM windrow.tally t WHERE t.org_id = %(org_id)s
), seen AS (
    DELETE FROM windrow.consumer_seen s WHERE {{org_of(s)}} = %(org_id)s
), quarantined AS (
    DELETE FROM windrow.quarantine k WHERE {{org_of(k)}} = %(org_id)s
), crashed AS (
    DELETE FROM windrow.crash c WHERE {{org_of(c)}} = %(org_id)s
)
DELETE FROM windrow.org o WHERE o.org_id = %(org_id)s AND o.org = chr(127) || %(org_id)s::integer::text
