-- Returns a row if this shard has a queue of the org.
SELECT FROM windrow.queue q WHERE q.org = %(org)s LIMIT 1
