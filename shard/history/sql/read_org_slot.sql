-- The slot under which this shard files an org.
SELECT o.slot FROM windrow.org o WHERE o.org = %(org)s
