"""`windrow queues`: an org's queues and their configurations."""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from cli import options, output, values
from cli.layout import App
from cli.output import Column

if TYPE_CHECKING:
    from windrow.v1 import admin_pb2

app = App(help="Lists, configures, pauses and deletes queues.")


class Field(StrEnum):
    RETRY = "retry"
    MAX_ATTEMPTS = "max_attempts"
    RETENTION_DAYS = "retention_days"
    GROUP_CONCURRENCY = "group_concurrency"
    AGEING_SECONDS = "ageing_seconds"
    QUARANTINE_AFTER = "quarantine_after"


# The columns of the list that contain text. All other columns contain numbers.
_TEXTS = {"queue", "state", "retry", "created", "shard"}

_Kind: TypeAlias = Annotated[str, typer.Argument(metavar="KIND", show_default=False, help="The kind of the jobs.")]


@app.command("list")
def list_queues(
    org: options.Org,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Lists an org's queues by name."""
    from cli.calls import connect
    from cli.messages import no_queues
    from windrow.v1 import admin_pb2

    queues: list[admin_pb2.QueueInfo] = []
    with connect(address, timeout) as router:
        for page in router.pages(router.admin.ListQueues, admin_pb2.ListQueuesRequest(org=org)):
            if as_json:
                output.say_json(queue_json(queue) for queue in page.queues)
            queues += page.queues
    if as_json:
        return
    if not queues:
        output.note(no_queues(org))
        return
    rows = [_facts(queue) for queue in queues]
    # Leave out a setting that no queue has.
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    columns = [Column(title=title, coloured=title == "state", right=title not in _TEXTS) for title in titles]
    output.table(columns, [[row[title] for title in titles] for row in rows])


@app.command()
def show(
    org: options.Org,
    queue: options.Queue,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Shows one queue's configuration."""
    from cli.calls import connect
    from windrow.v1 import admin_pb2

    with connect(address, timeout) as router:
        request = admin_pb2.GetQueueRequest(org=org, queue=queue)
        _print(router.call(router.admin.GetQueue, request).queue, as_json=as_json)


@app.command()
def why(
    org: options.Org,
    queue: options.Queue,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Says why a queue gives no jobs now, or what it would give.

    The first cause is the most decisive one. Looks at the first jobs only, so it is quick even for a queue with
    millions of jobs. Exit code 4: the org has no such queue.
    """
    from cli.calls import connect
    from cli.messages import causes_json, causes_shown, time_json, time_shown
    from windrow.v1 import admin_pb2

    with connect(address, timeout) as router:
        found = router.call(router.admin.ExplainQueue, admin_pb2.ExplainQueueRequest(org=org, queue=queue))
    if as_json:
        causes = causes_json(found.causes)
        output.say_json([{"org": org, "queue": queue, "runs_at": time_json(found, "runs_at"), "causes": causes}])
        return
    why = causes_shown(found.causes, of_queue=True)
    output.facts([("queue", queue), ("why", why), ("runs at", time_shown(found, "runs_at"))])


@app.command()
def create(
    org: options.Org,
    queue: options.Queue,
    retry: options.Retry = None,
    max_attempts: options.MaxAttempts = None,
    retention: options.Retention = None,
    group_concurrency: options.GroupConcurrency = None,
    ageing: options.Ageing = None,
    quarantine_after: options.QuarantineAfter = None,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Creates a queue with a configuration. Optional: a queue's first job creates it with the defaults.

    The defaults are --retry 1s..1h, --max-attempts 20 and the org's retention, which is 30d unless `windrow orgs keep`
    has changed it. Exit code 5: the queue exists.
    """
    from cli.calls import connect
    from windrow.v1 import admin_pb2

    with connect(address, timeout) as router:
        config = _config(retry, max_attempts, retention, group_concurrency, ageing, quarantine_after)
        request = admin_pb2.CreateQueueRequest(org=org, queue=queue, config=config)
        _print(router.call(router.admin.CreateQueue, request).queue, as_json=as_json)


@app.command()
def update(
    org: options.Org,
    queue: options.Queue,
    retry: options.Retry = None,
    max_attempts: options.MaxAttempts = None,
    retention: options.Retention = None,
    group_concurrency: options.GroupConcurrency = None,
    ageing: options.Ageing = None,
    quarantine_after: options.QuarantineAfter = None,
    reset: Annotated[
        list[Field] | None,
        typer.Option(
            "--reset",
            metavar="FIELD",
            show_default=False,
            help=f"Reset to the default: {', '.join(Field)}; may be repeated.",
        ),
    ] = None,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Changes the given settings of a queue, also for jobs that are queued already.

    --retention applies to jobs that finish from now on.
    """
    from cli.calls import connect
    from cli.messages import update_mask
    from windrow.v1 import admin_pb2

    config = _config(retry, max_attempts, retention, group_concurrency, ageing, quarantine_after)
    if not config.ListFields() and not reset:
        raise typer.BadParameter(
            "give a setting to change",
            param_hint="'--retry' / '--max-attempts' / '--retention' / '--group-concurrency' / '--ageing' / "
            "'--quarantine-after' / '--reset'",
        )
    request = admin_pb2.UpdateQueueRequest(
        org=org, queue=queue, config=config, update_mask=update_mask(config, reset or ())
    )
    with connect(address, timeout) as router:
        _print(router.call(router.admin.UpdateQueue, request).queue, as_json=as_json)


@app.command()
def pause(
    org: options.Org,
    queue: options.Queue,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Stops dequeues from a queue; enqueues, acks and leases continue."""
    from cli.calls import connect
    from windrow.v1 import admin_pb2

    with connect(address, timeout) as router:
        request = admin_pb2.PauseQueueRequest(org=org, queue=queue)
        _print(router.call(router.admin.PauseQueue, request).queue, as_json=as_json)


@app.command()
def resume(
    org: options.Org,
    queue: options.Queue,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Ends a pause."""
    from cli.calls import connect
    from windrow.v1 import admin_pb2

    with connect(address, timeout) as router:
        request = admin_pb2.ResumeQueueRequest(org=org, queue=queue)
        _print(router.call(router.admin.ResumeQueue, request).queue, as_json=as_json)


@app.command()
def quarantine(
    org: options.Org,
    queue: options.Queue,
    kind: _Kind,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", show_default=False, help="Why, for others to read.")
    ] = "",
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Sets a queue's jobs of one kind aside, until `windrow queues release`.

    Within seconds no consumer gets them; leased jobs may finish. `windrow queues update --quarantine-after` does this
    by itself for kinds that crash their workers, and then lets one job through at a time.
    """
    from cli.calls import connect
    from windrow.v1 import admin_pb2

    with connect(address, timeout) as router:
        request = admin_pb2.QuarantineKindRequest(org=org, queue=queue, kind=kind, reason=reason)
        router.call(router.admin.QuarantineKind, request)
    if as_json:
        output.say_json([{"org": org, "queue": queue, "kind": kind, "quarantined": True}])
    else:
        output.say(f"kind {kind!r} of queue {queue!r} of org {org!r} is quarantined")


@app.command()
def release(
    org: options.Org,
    queue: options.Queue,
    kind: _Kind,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Ends the quarantine of a kind: its jobs are ready again within seconds."""
    from cli.calls import connect
    from windrow.v1 import admin_pb2

    with connect(address, timeout) as router:
        request = admin_pb2.ReleaseKindRequest(org=org, queue=queue, kind=kind)
        released = router.call(router.admin.ReleaseKind, request).released
    if as_json:
        output.say_json([{"org": org, "queue": queue, "kind": kind, "released": released}])
    else:
        ended = "is released" if released else "was not quarantined"
        output.say(f"kind {kind!r} of queue {queue!r} of org {org!r} {ended}")


@app.command()
def quarantined(
    org: options.Org,
    queue: Annotated[
        str, typer.Option("--queue", metavar="QUEUE", show_default="all queues", help="Only this queue.")
    ] = "",
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Lists the kinds of an org's jobs that are quarantined."""
    from cli.calls import connect
    from cli.messages import time_shown
    from windrow.v1 import admin_pb2

    with connect(address, timeout) as router:
        request = admin_pb2.ListQuarantinesRequest(org=org, queue=queue)
        found = router.call(router.admin.ListQuarantines, request).quarantines
    if as_json:
        output.say_json(_quarantine_json(org, one) for one in found)
        return
    if not found:
        output.note(f"no kind of org {org!r} is quarantined")
        return
    columns = [
        Column(title="queue"),
        Column(title="kind"),
        Column(title="since"),
        Column(title="crashes", right=True),
        Column(title="set aside", right=True),
        Column(title="next trial"),
        Column(title="reason"),
    ]
    rows = [
        (
            one.queue,
            one.kind,
            time_shown(one, "since"),
            str(one.crashes),
            f"{'> ' if one.at_least else ''}{one.set_aside:,}",
            f"now: {one.trial_id}" if one.trial_id else time_shown(one, "next_trial_at"),
            one.reason or ("by an operator" if one.by_operator else ""),
        )
        for one in found
    ]
    output.table(columns, rows)


@app.command()
def delete(
    org: options.Org,
    queue: options.Queue,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Deletes an empty queue and its configuration; its finished jobs can still be found."""
    from cli.calls import connect
    from windrow.v1 import admin_pb2

    with connect(address, timeout) as router:
        router.call(router.admin.DeleteQueue, admin_pb2.DeleteQueueRequest(org=org, queue=queue))
    output.say_deleted(org, "queue", queue, as_json=as_json)


def _config(
    retry: values.Retry | None,
    max_attempts: int | None,
    retention: int | None,
    group_concurrency: int | None,
    ageing: int | None,
    quarantine_after: int | None,
) -> admin_pb2.QueueConfig:
    from cli.messages import retry_message
    from windrow.v1 import admin_pb2

    return admin_pb2.QueueConfig(
        retry=None if retry is None else retry_message(retry),
        max_attempts=max_attempts,
        retention_days=retention,
        group_concurrency=group_concurrency,
        ageing_seconds=ageing,
        quarantine_after=quarantine_after,
    )


def _print(queue: admin_pb2.QueueInfo, *, as_json: bool) -> None:
    if as_json:
        output.say_json([queue_json(queue)])
        return
    name, *rest = _facts(queue).items()
    output.facts([name, ("org", queue.org), *rest])


def _facts(queue: admin_pb2.QueueInfo) -> dict[str, str]:
    """Returns the fields of a queue that people see, by title."""
    from cli.messages import retry_policy, time_shown

    return {
        "queue": queue.queue,
        "state": "paused" if queue.paused else "open",
        "retry": values.retry_text(retry_policy(queue.config.retry)),
        "max attempts": str(queue.config.max_attempts),
        "finished kept": values.retention_text(queue.config.retention_days),
        "per group": str(queue.config.group_concurrency),
        "ageing": _ageing_text(queue.config),
        "quarantine after": str(queue.config.quarantine_after) if queue.config.HasField("quarantine_after") else "",
        "created": time_shown(queue, "created_at"),
        "shard": queue.shard,
    }


def _quarantine_json(org: str, quarantine: admin_pb2.Quarantine) -> dict[str, object]:
    from cli.messages import time_json

    return {
        "org": org,
        "queue": quarantine.queue,
        "kind": quarantine.kind,
        "since": time_json(quarantine, "since"),
        "crashes": quarantine.crashes,
        "reason": quarantine.reason,
        "by_operator": quarantine.by_operator,
        "next_trial_at": time_json(quarantine, "next_trial_at"),
        "trial_id": quarantine.trial_id or None,
        "trial_since": time_json(quarantine, "trial_since"),
        "set_aside": quarantine.set_aside,
        "at_least": quarantine.at_least,
    }


def _ageing_text(config: admin_pb2.QueueConfig) -> str:
    return values.exact(timedelta(seconds=config.ageing_seconds)) if config.HasField("ageing_seconds") else ""


def queue_json(queue: admin_pb2.QueueInfo) -> dict[str, object]:
    from cli.messages import retry_json, time_json

    return {
        "org": queue.org,
        "queue": queue.queue,
        "paused": queue.paused,
        **{field.value: None for field in Field},
        **{field.name: value for field, value in queue.config.ListFields()},
        "retry": retry_json(queue.config.retry),
        "created_at": time_json(queue, "created_at"),
        "shard": queue.shard,
    }
