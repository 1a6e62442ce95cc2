"""Benchmarks: how many jobs a second are enqueued, finished, and both; and how much CPU time each process spends on one
job."""
