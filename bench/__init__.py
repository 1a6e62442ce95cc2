"""Benchmarks. They measure how many jobs a second are enqueued, how many are finished, and how many are enqueued and
finished at the same time. They also measure how much CPU time each kind of process spends on one job."""
