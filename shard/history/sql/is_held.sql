-- Returns a row if this org is under legal hold, as far as this shard knows.
SELECT FROM windrow.org o WHERE o.org = %(org)s AND o.held
