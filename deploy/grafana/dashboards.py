"""Generates Grafana's dashboards in this folder. With --check, only reports whether the files are up to date.

A panel has a title, Grafana's name of a unit, a description, and queries. Each query has a legend for its lines.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent
_OVER = "[$__rate_interval]"
# A counter has a series for each combination of its labels' values, even before the first event. If there are many such
# series, `> 0` leaves out those that do not rise now: otherwise a legend would have up to a thousand entries.
_ENQUEUED = "windrow_jobs_enqueued_total"
_SETTLED = "windrow_leases_settled_total"
_NOT_WAITING = '{method!="windrow.v1.Queue/Dequeue"}'


class Panel(NamedTuple):
    title: str
    unit: str
    description: str
    # The queries. The key of each query is the legend of its lines.
    queries: dict[str, str]


def _quantile(of: float, histogram: str, by: str, where: str = "") -> str:
    return f"histogram_quantile({of}, sum by (le, {by}) (rate({histogram}_bucket{where}{_OVER})))"


# All routers report the same figures, so take the `max`.
_DEPTH = "max by (shard, org, queue, state) (windrow_queue_jobs)"
_OLDEST = "windrow_queue_oldest_ready_seconds"

CLUSTER = (
    Panel("Routers", "short",
          "Routers that Prometheus reaches. Each machine counts once, however many processes it has.",
          {"reached": 'sum(up{job="windrow"})'}),
    Panel("Shards that can be used", "bool_yes_no",
          "No: at least one router process cannot use the shard. Calls for its orgs fail with UNAVAILABLE.",
          {"{{shard}}": "min by (shard) (windrow_shard_up)"}),
    Panel("The catalog can be read", "bool_yes_no",
          "No: a process of the router at this address has not read it for 10 seconds, and goes on with its copy.",
          {"{{instance}}": "min by (instance) (windrow_catalog_up)"}),
    Panel("Slots that move", "short",
          "Slots that leave a shard, without those of pinned orgs: their new jobs already go to another one.",
          {"{{shard}}": 'max by (shard) (windrow_slots{state="leaving"})'}),
    Panel("Late schedules", "s", "How late the schedule is that is the latest, by shard.",
          {"{{shard}}": "max by (shard) (windrow_schedule_late_seconds)"}),
    Panel("Enqueues that fail", "percentunit",
          "The share of Enqueue calls that fail for a reason of the service, over 5 minutes. The objective is 0.1 %.",
          {"failed": "windrow:enqueue_errors:ratio_rate5m"}),
    Panel("Jobs", "ops",
          "Jobs a second: enqueued for the first time, and acked. The backlog grows while the first is higher.",
          {"enqueued": f'sum(rate({_ENQUEUED}{{outcome="new"}}{_OVER}))',
           "acked": f'sum(rate({_SETTLED}{{verb="ack",answer="ok"}}{_OVER}))'}),
    Panel("Jobs enqueued on each shard", "ops",
          "New jobs a second by shard. Orgs differ: one shard may have much more than its share of the slots.",
          {"{{shard}}": f'sum by (shard) (rate({_ENQUEUED}{{outcome="new"}}{_OVER}))'}),
    Panel("Unfinished jobs", "short", "Jobs by state, as they were counted last: about every minute.",
          {"{{state}}": f"sum by (state) ({_DEPTH})"}),
    Panel("Oldest ready job", "s", "How long the job has waited that consumers could have leased first, by shard.",
          {"{{shard}}": f"max by (shard) ({_OLDEST})"}),
    Panel("Calls", "reqps", "Calls a second that have ended, by method.",
          {"{{method}}": f"sum by (method) (rate(windrow_calls_total{_OVER})) > 0"}),
    Panel("Calls that are refused or fail", "reqps",
          "Calls a second that did not end with OK, by method and status. docs/errors.md explains each.",
          {"{{method}} {{code}}": f'sum by (method, code) (rate(windrow_calls_total{{code!="OK"}}{_OVER})) > 0'}),
    Panel("Time of calls, 99th percentile", "s",
          "99 of 100 calls take less. Dequeue is not shown, because its time includes waiting for jobs.",
          {"{{method}}": _quantile(0.99, "windrow_call_duration_seconds", "method", _NOT_WAITING)}),
    Panel("Quarantined kinds", "short",
          "Kinds of jobs whose jobs are set aside, because they crashed their workers or an operator did it.",
          {"{{shard}}": "max by (shard) (windrow_quarantined_kinds)"}),
    Panel("Time until a certificate expires", "s",
          "Of each router with TLS. Routers take up new files without a restart.",
          {"{{instance}}": "min by (instance) (windrow_certificate_expiry_timestamp_seconds > 0) - time()"}),
)  # fmt: skip

_OF_SHARD = '{shard="$shard"}'
SHARD = (
    Panel("Can be used", "bool_yes_no",
          "No: the router at this address cannot use the shard with all of its processes.",
          {"{{instance}}": f"min by (instance) (windrow_shard_up{_OF_SHARD})"}),
    Panel("Jobs enqueued", "ops", "Jobs of enqueues a second. Duplicates were known before and are not stored again.",
          {"{{outcome}}": f"sum by (outcome) (rate({_ENQUEUED}{_OF_SHARD}{_OVER}))"}),
    Panel("Jobs claimed", "ops",
          "Jobs leased a second by claims, without those that an enqueue hands over to a waiting consumer.",
          {"claimed": f"sum(rate(windrow_jobs_claimed_total{_OF_SHARD}{_OVER}))"}),
    Panel("Time until a job is leased", "s",
          "Of each claim that got jobs, how long the first job had waited. Jobs that are handed over do not wait.",
          {"median": _quantile(0.5, "windrow_pickup_seconds", "shard", _OF_SHARD),
           "99th percentile": _quantile(0.99, "windrow_pickup_seconds", "shard", _OF_SHARD)}),
    Panel("Jobs that die", "ops", "Jobs a second that fail permanently or have no attempt left.",
          {"dead": f"sum(rate(windrow_jobs_dead_total{_OF_SHARD}{_OVER}))"}),
    Panel("Leases that expire", "ops",
          "Leases a second that nobody ended, found when their jobs were leased again. Their workers died or hung.",
          {"expired": f"sum(rate(windrow_leases_expired_total{_OF_SHARD}{_OVER}))"}),
    Panel("Leases settled", "ops", "Leases settled or extended a second, by verb and answer.",
          {"{{verb}} {{answer}}": f"sum by (verb, answer) (rate({_SETTLED}{_OF_SHARD}{_OVER})) > 0"}),
    Panel("Acks that come too late", "percentunit",
          "The share of acks whose lease had ended: those jobs run again. Extend leases, or set a longer window.",
          {"late": f'sum(rate({_SETTLED}{{shard="$shard",verb="ack",answer="stale"}}{_OVER}) or vector(0)) / '
                   f'sum(rate({_SETTLED}{{shard="$shard",verb="ack"}}{_OVER}))'}),
    Panel("Acts", "ops", "Acts a second. An act is the statements that several calls share.",
          {"{{act}}": f"sum by (act) (rate(windrow_act_duration_seconds_count{_OF_SHARD}{_OVER}))"}),
    Panel("Time of acts, median", "s", "Half of the acts take less, their wait for a connection included.",
          {"{{act}}": _quantile(0.5, "windrow_act_duration_seconds", "act", _OF_SHARD)}),
    Panel("Time of acts, 99th percentile", "s", "99 of 100 acts take less. If it rises, run `windrow doctor`.",
          {"{{act}}": _quantile(0.99, "windrow_act_duration_seconds", "act", _OF_SHARD)}),
    Panel("Oldest snapshot", "s", "How long it has kept dead rows from being removed. `windrow doctor` names it.",
          {"held": f"max(windrow_oldest_snapshot_seconds{_OF_SHARD})"}),
    Panel("Archiver is late", "s",
          "For how long a day of finished jobs could have been archived or dropped. With a nightly pass, up to a day.",
          {"late": f"max(windrow_archive_late_seconds{_OF_SHARD})"}),
    Panel("Connections that are used", "percentunit", "The share of the connections that the shard's server allows.",
          {"used": f"max(windrow_connections_used_ratio{_OF_SHARD})"}),
    Panel("Age of the oldest row", "short",
          "In transactions. Postgres refuses writes before it is two billion; autovacuum freezes rows long before.",
          {"transactions": f"max(windrow_transaction_age{_OF_SHARD})"}),
    Panel("Partitions that are missing", "short", "Partitions of finished jobs that routers have not made ahead.",
          {"missing": f"max(windrow_partitions_missing{_OF_SHARD})"}),
    Panel("Calls that share an act", "short",
          "Mean number of calls of an act. It rises with the load, and then each call costs less.",
          {"{{act}}": f"sum by (act) (rate(windrow_act_calls_sum{_OF_SHARD}{_OVER})) / "
                      f"sum by (act) (rate(windrow_act_calls_count{_OF_SHARD}{_OVER}))"}),
)  # fmt: skip

_OF_ORG = '{org="$org"}'
ORG = (
    Panel("Unfinished jobs", "short",
          "The org's jobs by state, of those of its queues that the metrics name, as they were counted last.",
          {"{{state}}": f"sum by (state) (max by (shard, queue, state) (windrow_queue_jobs{_OF_ORG}))"}),
    Panel("Ready jobs by queue", "short", "Jobs that consumers could lease, or that wait for a slot of their group.",
          {"{{queue}}": 'sum by (queue) (max by (shard, queue) (windrow_queue_jobs{org="$org",state="ready"}))'}),
    Panel("Leased jobs by queue", "short", "Jobs that are being worked on.",
          {"{{queue}}": 'sum by (queue) (max by (shard, queue) (windrow_queue_jobs{org="$org",state="leased"}))'}),
    Panel("Dead jobs by queue", "short", "Jobs that failed permanently or had no attempt left. They can be redriven.",
          {"{{queue}}": 'sum by (queue) (max by (shard, queue) (windrow_queue_jobs{org="$org",state="dead"}))'}),
    Panel("Oldest ready job by queue", "s", "How long the job has waited that consumers could have leased first.",
          {"{{queue}}": f"max by (queue) ({_OLDEST}{_OF_ORG})"}),
)  # fmt: skip


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    across, width, height = 3, 8, 8
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": {"type": "prometheus", "uid": "windrow"},
        "gridPos": {"x": number % across * width, "y": number // across * height, "w": width, "h": height},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "expr": query, "legendFormat": legend}
            # Only these buckets have exemplars (router/gate/exemplars.py).
            | ({"exemplar": True} if "windrow_call_duration_seconds_bucket" in query else {})
            for place, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def dashboard(name: str, panels: tuple[Panel, ...], variables: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "uid": f"windrow-{name}",
        "title": f"Windrow: {name}",
        "tags": ["windrow"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _variable(label: str, metric: str) -> dict[str, Any]:
    """Returns a dashboard variable. The reader of the dashboard chooses its value among the values of this label."""
    return {
        "name": label,
        "label": label,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "windrow"},
        "query": f"label_values({metric}, {label})",
        "refresh": 2,
        "sort": 1,
    }


def main() -> int:
    made = {
        "cluster": dashboard("cluster", CLUSTER, []),
        "shard": dashboard("shard", SHARD, [_variable("shard", "windrow_shard_up")]),
        "org": dashboard("org", ORG, [_variable("org", "windrow_queue_jobs")]),
    }
    stale = 0
    for name, content in made.items():
        file, text = FOLDER / f"{name}.json", json.dumps(content, indent=2) + "\n"
        if file.exists() and file.read_text() == text:
            continue
        stale += 1
        if "--check" in sys.argv[1:]:
            print(f"deploy/grafana/{file.name} does not match dashboards.py: run ./run gen")
        else:
            file.write_text(text)
            print(f"deploy/grafana/{file.name}")
    return 1 if stale and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
