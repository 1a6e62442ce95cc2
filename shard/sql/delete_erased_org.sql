-- Its queues have gone before.
DELETE FROM windrow.org o WHERE o.org_id = %(org_id)s AND o.org = chr(127) || %(org_id)s::integer::text
