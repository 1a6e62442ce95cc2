"""Settles leases: sends each lease to the shard that its token names, and collects the answers."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from router.codec import convert
from router.codec.lease_verbs import EXTEND, LeaseVerb, parse
from router.fleet.fleet import Fleet
from router.route.by_id import decide
from shard.job_id import from_hex
from shard.queue.settle import Settlement
from shard.vocabulary import Answer, Lease, OrgId
from windrow.v1 import job_pb2

Answers = list[job_pb2.JobAnswer.ValueType]
_Tokens = Sequence[tuple[int, Lease]]


class Leases:
    """Settles leases on the shards that hold them."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def settle(
        self, org: OrgId, verb: LeaseVerb, entries: Sequence[Any], *, field: str, window_us: int
    ) -> Answers:
        """Settles the leases of a request's entries. `field` is the name of the field that has the entries. `window_us`
        is the new window if the verb is an extend.

        Asks each shard that the tokens name about its leases, then looks for the jobs that those shards do not know.
        Such a job may have moved to another shard after its lease ended, together with its attempt history, which says
        how the lease ended.

        Returns the answers in the request's order. Raises InvalidRequest, ShardUnavailable. A call that failed half-way
        may be repeated."""
        tokens = parse(entries, field)
        call = verb.settlement(org, [lease for _, lease in tokens], entries, window_us)
        answers = await self._settle(org, tokens, call)
        if self._fleet.pools.any:
            leases = [lease for (_, lease), answer in zip(tokens, answers, strict=True) if answer is Answer.OK]
            if verb is EXTEND:
                self._fleet.pools.extended(leases, window_us=window_us)
            else:
                self._fleet.pools.ended(leases)
        if answers.count(Answer.OK) == len(answers):
            return [job_pb2.JOB_ANSWER_OK] * len(answers)
        return [convert.ANSWERS[answer] for answer in answers]

    async def _settle(self, org: OrgId, tokens: _Tokens, call: Settlement) -> list[Answer]:
        tags = {tag for tag, _ in tokens}
        if len(tags) == 1:
            answers = await self._ask_one(tags.pop(), call)
        else:
            answers = await self._ask_all(tokens, call)
        if answers.count(Answer.OK) == len(answers):
            return answers
        missing = [at for at, answer in enumerate(answers) if answer is Answer.NOT_FOUND]
        if missing:
            unknown = call.only(missing)
            ids = [from_hex(lease.job_hex) for lease in unknown.leases]
            found = await decide(self._fleet, org, ids, lambda member, there: member.store.settle(unknown.only(there)))
            for at, answer in zip(missing, found, strict=True):
                answers[at] = answer
        return answers

    async def _ask_all(self, tokens: _Tokens, call: Settlement) -> list[Answer]:
        positions: dict[int, list[int]] = defaultdict(list)
        for at, (tag, _) in enumerate(tokens):
            positions[tag].append(at)
        answers = [Answer.NOT_FOUND] * len(tokens)
        # Let every shard finish before an error is raised, because the error does not undo what other shards change.
        outcomes = await asyncio.gather(
            *(self._ask_one(tag, call.only(there)) for tag, there in positions.items()), return_exceptions=True
        )
        for there, outcome in zip(positions.values(), outcomes, strict=True):
            if isinstance(outcome, BaseException):
                raise outcome
            for at, answer in zip(there, outcome, strict=True):
                answers[at] = answer
        return answers

    async def _ask_one(self, tag: int, call: Settlement) -> list[Answer]:
        """Asks the shard with this tag. If the cluster has no such shard, the answer is NOT_FOUND for each lease."""
        member = self._fleet.by_tag(tag)
        return [Answer.NOT_FOUND] * len(call.leases) if member is None else await member.store.settle(call)
