"""Gives a shard a history: inserts finished jobs of past days by SQL into the partitions of their days. The rows are as
claims and acks would have left them."""

from __future__ import annotations

import psycopg
from psycopg import sql

from bench.payloads import stamped
from shard.history.days import Day
from shard.postgres import partitions

# An id contains the time when its job was made; the jobs are spread evenly over the day. The rest of the id comes from
# the job's number.
_FILL = """
INSERT INTO {} (
    id, queue_id, enqueued_at, run_at, finished_at, lease, leased_at, priority, attempt, state, kind, payload, worker,
    retention
)
SELECT
    (
        lpad(to_hex((extract(epoch FROM made.at) * 1000)::bigint), 12, '0') || '7' || substr(md5(n::text), 1, 3)
        || '8' || substr(md5(n::text), 4, 15)
    )::uuid,
    %(queue_id)s, made.at, made.at, made.at + interval '5 milliseconds', n, made.at, 5, 1, 'succeeded', 'no-op',
    %(payload)s::bytea, 'bench', %(retention)s
FROM generate_series(1, %(count)s) AS n
CROSS JOIN LATERAL (
    SELECT %(first)s::date::timestamp AT TIME ZONE 'UTC' + n * (interval '86000 seconds' / %(count)s) AS at
) made
"""
_DAY = """
SELECT to_char(d.day, 'YYYY-MM-DD'), to_char(d.day + 1, 'YYYY-MM-DD')
FROM (SELECT (now() AT TIME ZONE 'UTC')::date - %s AS day) d
"""


def fill_day(dsn: str, *, org: str, queue: str, days_ago: int, retention: int, count: int) -> Day:
    """Inserts `count` jobs into an existing queue, as jobs that finished `days_ago` days ago, and adds them to the
    books. Returns the `Day` that describes this day when it has turned cold."""
    with psycopg.connect(dsn) as connection:
        ((queue_id,),) = connection.execute(
            "SELECT queue_id FROM windrow.queue WHERE org = %s AND queue = %s", [org, queue]
        ).fetchall()
        ((first, past),) = connection.execute(_DAY, [days_ago]).fetchall()
        name = f"finished_{retention}_{first.replace('-', '')}"
        connection.execute(partitions.making(name, retention, first, past), prepare=False)
        connection.execute(
            sql.SQL(_FILL).format(partitions.table(name)),
            {
                "queue_id": queue_id,
                "count": count,
                "payload": stamped(1)[0],
                "first": first,
                "retention": retention,
            },
        )
        connection.execute(
            "INSERT INTO windrow.tally (org_id, accepted) SELECT (%s & 4294967295)::integer, %s", [queue_id, count]
        )
    with psycopg.connect(dsn, autocommit=True) as connection:
        # Vacuum the partition, because autovacuum does so during a real day.
        connection.execute(sql.SQL("VACUUM (ANALYZE) {}").format(partitions.table(name)))
    return Day(f"cold_{retention}_{first.replace('-', '')}", retention, first, past, True, True, False)
