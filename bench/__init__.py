"""Benchmarks: how many jobs a second go in, come out, and live from end to end; and what each process pays for one."""
