-- Deletes an org's policy.
DELETE FROM windrow.policy p WHERE p.org = %(org)s
