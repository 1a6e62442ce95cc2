"""What operators ask of one shard: queues, lists of jobs, counts, purge, redrive."""
