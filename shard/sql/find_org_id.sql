-- The id of an org, if it has ever been seen here.
SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s
