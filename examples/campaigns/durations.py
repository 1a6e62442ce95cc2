"""Prints for each step of the campaign how long it took to send a message, and how late messages were. Reads all sent
messages that Windrow still keeps.

python -m examples.campaigns.durations shop
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from statistics import median, quantiles

import windrow
from examples.campaigns.plan import CAMPAIGN, QUEUE


def sent(client: windrow.SyncClient) -> Iterator[windrow.JobRecord]:
    """Yields the jobs of all messages that were sent, the newest first."""
    conditions = {"campaign": CAMPAIGN}
    return client.iter_jobs(QUEUE, state=windrow.JobState.SUCCEEDED, attributes=conditions, page_size=1000)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tells how long messages took to send.")
    parser.add_argument("org")
    given = parser.parse_args()
    took_s: dict[str, list[float]] = defaultdict(list)
    late_s: dict[str, list[float]] = defaultdict(list)
    tries: dict[str, int] = defaultdict(int)
    with windrow.SyncClient(org=given.org) as client:
        for job in sent(client):
            # All times are of the shard's clock. The last attempt is the one that sent the message.
            step, last = job.attributes["step"], job.attempts[-1]
            took_s[step].append((last.ended_at - last.leased_at).total_seconds())
            late_s[step].append((last.leased_at - job.run_at).total_seconds())
            tries[step] += job.attempt
    print("step          sent  attempts  median s    95 % s     max s  late max s")
    for step, times in took_s.items():
        most = quantiles(times, n=20)[-1] if len(times) > 1 else times[0]
        figures = f"{median(times):9.3f} {most:9.3f} {max(times):9.3f} {max(late_s[step]):11.3f}"
        print(f"{step:12} {len(times):5} {tries[step]:9} {figures}")


if __name__ == "__main__":
    main()
