-- Ends the quarantine of a kind whose trial has ended properly.
DELETE FROM windrow.quarantine k
WHERE k.queue_id = %(queue_id)s AND k.kind = %(kind)s AND k.trial_id = %(trial_id)s::uuid
