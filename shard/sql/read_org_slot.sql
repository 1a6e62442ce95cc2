-- The slot that this shard knows an org by.
SELECT o.slot FROM windrow.org o WHERE o.org = %(org)s
