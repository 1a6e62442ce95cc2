"""Operators' calls to one shard, about queues, lists of jobs, counts, purges and redrives, and the data that they
use."""
