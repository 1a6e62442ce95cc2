"""Writes the results of a run as Markdown and as JSON. Pure except for writing the files."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from chaos import figures
from chaos.run import Order, Told
from proof.checker import EXAMINED, Violation
from proof.environment import described
from proof.table import Table

_SHOWN_MAX = 20


def verdict(found: Sequence[Violation], *, excused: bool = False) -> Mapping[str, list[str]]:
    """Returns the violations by invariant: those that count, or the excused ones, which a restored backup explains. The
    result has every invariant of EXAMINED, and every other invariant that is violated."""
    by_invariant: dict[str, list[str]] = {name: [] for name in EXAMINED}
    for one in found:
        if one.excused is excused:
            by_invariant.setdefault(one.invariant, []).append(one.what)
    return by_invariant


def write(
    folder: Path, order: Order, told: Told, found: Sequence[Violation], environment: Mapping[str, object]
) -> None:
    """Writes report.json and report.md. `found` includes excused violations."""
    (folder / "report.md").write_text(markdown(order, told, found, environment))
    document = to_json(order, told, found, environment)
    (folder / "report.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def markdown(order: Order, told: Told, found: Sequence[Violation], environment: Mapping[str, object]) -> str:
    violated = verdict(found)
    count = sum(map(len, violated.values()))
    whole = "every invariant held" if not count else f"{count} violations"
    tables = [
        Table(
            title="Invariants",
            head=("", "invariant", "verdict"),
            rows=[
                (name, EXAMINED.get(name, ""), "held" if not whats else f"**{len(whats)} violations**")
                for name, whats in violated.items()
            ],
        ),
        _faults(told),
        *_restored(told, found),
        _moves(told),
        Table(
            title="Jobs", head=("", "count"), rows=[(what, f"{n:,}") for what, n in figures.jobs(told.evidence).items()]
        ),
        Table(
            title="Calls that were refused or not answered",
            head=("call", "code", "count"),
            rows=[(verb, code, f"{n:,}") for (verb, code), n in sorted(figures.errors(told.evidence.history).items())],
        ),
        Table(
            title="Longest unavailability",
            head=("shard", "s"),
            rows=[(shard, f"{seconds:.1f}") for shard, seconds in figures.unavailable_s(told).items()],
            note="In which it had slots and acknowledged no enqueue, from the first fault until all was healed.",
        ),
        Table(
            title="Most memory of a router process",
            head=("process", "MiB resident"),
            rows=[(str(pid), f"{size / 2**20:,.0f}") for pid, size in sorted(told.evidence.resident_bytes.items())],
            note="No bound was given."
            if order.router_bytes_max is None
            else f"The bound is {order.router_bytes_max / 2**20:,.0f} MiB.",
        ),
    ]
    text = [
        f"# Chaos: {whole}\n",
        f"Seed {order.seed}, {order.seconds:g} s of faults. {described(environment)}\n",
        "![timeline](timeline.png)\n",
        *(table.markdown() for table in tables),
    ]
    for name, whats in violated.items():
        if whats:
            more = [f"- and {len(whats) - _SHOWN_MAX} more, in report.json"] if len(whats) > _SHOWN_MAX else []
            text += [f"### Violations of {name}\n", *(f"- {what}" for what in whats[:_SHOWN_MAX]), *more, ""]
    return "\n".join(text)


def _faults(told: Told) -> Table:
    counts = Counter(strike.fault for strike in told.strikes)
    targets: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for strike in told.strikes:
        targets[strike.fault][strike.target] += 1
    rows = [
        (fault, str(count), ", ".join(f"{target} × {n}" for target, n in sorted(targets[fault].items())))
        for fault, count in sorted(counts.items())
    ]
    rows += [(fault, "—", f"{n} skipped: {why}") for (fault, why), n in sorted(told.skipped.items())]
    troubled = sum(bool(strike.trouble) for strike in told.strikes)
    note = f"{troubled} of them found their target in no state to be struck, as report.json says." if troubled else ""
    return Table(title=f"Faults: {len(told.strikes)}", head=("fault", "count", "targets"), rows=rows, note=note)


def _restored(told: Told, found: Sequence[Violation]) -> list[Table]:
    restored = told.evidence.restored
    if restored is None:
        return []
    rows = [(what, f"{count:,}") for what, count in figures.restored(told.evidence).items()]
    rows += [(f"excused, {name}", f"{len(whats):,}") for name, whats in verdict(found, excused=True).items() if whats]
    note = (
        f"Copied {restored.copied_s - told.began_s:.1f} s after the first fault, and put in its place "
        f"{restored.swapped_s - restored.copied_s:.1f} s later. It could be reached for "
        f"{restored.accepting_s - restored.back_s:.1f} s until somebody began to accept it, which took "
        f"{restored.accepted_s - restored.accepting_s:.1f} s."
    )
    return [Table(title=f"The backup of {restored.shard} that was restored", head=("", "count"), rows=rows, note=note)]


def _moves(told: Told) -> Table:
    moves = figures.moves(told.evidence)
    ended = [move for move in moves if move.ended_s is not None]
    ways: defaultdict[tuple[str, str], list[figures.Moved]] = defaultdict(list)
    for move in moves:
        ways[move.source, move.target].append(move)
    rows = [
        (
            f"{source} → {target}",
            str(len(of_way)),
            f"{sum(move.slots for move in of_way):,}",
            f"{max(((move.ended_s or told.ended_s) - move.began_s for move in of_way), default=0.0):.1f}",
        )
        for (source, target), of_way in sorted(ways.items())
    ]
    slots = sum(move.slots for move in ended)
    return Table(
        title=f"Moves: {len(moves)} begun, {len(ended)} ended, {slots:,} slots moved",
        head=("way", "moves", "slots", "longest, s"),
        rows=rows,
        note=f"{figures.chunks(told.evidence):,} chunks of jobs went with them. Orgs with slots of their own: "
        f"{len(told.evidence.pins)}.",
    )


def _restored_json(told: Told) -> dict[str, object] | None:
    restored = told.evidence.restored
    if restored is None:
        return None
    times = ("copied_s", "swapped_s", "back_s", "accepting_s", "accepted_s")
    return {
        "shard": restored.shard,
        **{name: getattr(restored, name) - told.began_s for name in times},
        "counts": dict(figures.restored(told.evidence)),
        "told": sorted({one.error for one in restored.told}),
    }


def to_json(
    order: Order, told: Told, found: Sequence[Violation], environment: Mapping[str, object]
) -> dict[str, object]:
    """Returns all results. Times are in seconds from the first fault."""
    strikes = [
        asdict(strike) | {"began_s": strike.began_s - told.began_s, "healed_s": strike.healed_s - told.began_s}
        for strike in told.strikes
    ]
    return {
        "seed": order.seed,
        "seconds": order.seconds,
        "cast": asdict(order.cast),
        "environment": dict(environment),
        "verdict": {name: {"held": not whats, "violations": whats} for name, whats in verdict(found).items()},
        "excused": {name: whats for name, whats in verdict(found, excused=True).items() if whats},
        "restored": _restored_json(told),
        "faults": strikes,
        "skipped": [{"fault": fault, "why": why, "count": n} for (fault, why), n in sorted(told.skipped.items())],
        "moves": [
            {
                "epoch": move.epoch,
                "from": move.source,
                "to": move.target,
                "slots": move.slots,
                **{
                    what: None if at_s is None else at_s - told.began_s
                    for what, at_s in (
                        ("began_s", move.began_s),
                        ("switched_s", move.switched_s),
                        ("ended_s", move.ended_s),
                    )
                },
            }
            for move in figures.moves(told.evidence)
        ],
        "chunks": figures.chunks(told.evidence),
        "jobs": dict(figures.jobs(told.evidence)),
        "errors": [
            {"call": verb, "code": code, "count": n}
            for (verb, code), n in sorted(figures.errors(told.evidence.history).items())
        ],
        "unavailable_s": dict(figures.unavailable_s(told)),
        "late_s_max": told.evidence.late_s_max,
        "answer_s_max": told.evidence.answer_s_max,
        "resident_bytes": {str(pid): size for pid, size in sorted(told.evidence.resident_bytes.items())},
        "resident_bytes_max": order.router_bytes_max,
        "healed_s": told.healed_s - told.began_s,
        "ended_s": told.ended_s - told.began_s,
    }
