-- Tells an org nothing any more.
DELETE FROM windrow.policy p WHERE p.org = %(org)s
