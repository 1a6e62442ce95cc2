-- Deletes the row of an erased org, whose queues are deleted already. A fold of the tally that was under way during the
-- erasure may have left a row; that goes too, and so does what is known of consumers and of crashes of the org.
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
