"""Ack, nack, extend and release: from lease tokens to the shards that the tokens name, and back to answers."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence

from router import convert
from router.fleet import Fleet
from router.member import Member
from shard.settling import Nack
from shard.vocabulary import Answer, Lease, OrgId
from windrow.v1 import job_pb2, queue_pb2

Answers = list[job_pb2.JobAnswer.ValueType]
_Tokens = Sequence[tuple[int, Lease]]


class Leases:
    """Every method answers in the request's order. Raises InvalidRequest, ShardUnavailable; a call of which a part was
    done may be repeated."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def ack(self, org: OrgId, acks: Sequence[queue_pb2.Ack]) -> Answers:
        leases = convert.leases([ack.lease for ack in acks], field="acks[{}].lease")
        results = [ack.result or None for ack in acks]
        if not any(results):
            return await self._ask_holders(leases, lambda member, at: member.store.ack(org, _at(leases, at)))
        return await self._ask_holders(
            leases, lambda member, at: member.store.ack(org, _at(leases, at), [results[one] for one in at])
        )

    async def nack(self, org: OrgId, nacks: Sequence[queue_pb2.Nack]) -> Answers:
        leases = convert.leases([nack.lease for nack in nacks], field="nacks[{}].lease")
        return await self._ask_holders(
            leases, lambda member, at: member.store.nack(org, [_nack(leases[one][1], nacks[one]) for one in at])
        )

    async def extend(
        self, org: OrgId, tokens: Sequence[bytes], *, window_us: int, field: str = "leases[{}]"
    ) -> Answers:
        leases = convert.leases(tokens, field=field)
        return await self._ask_holders(
            leases, lambda member, at: member.store.extend(org, _at(leases, at), window_us=window_us)
        )

    async def release(self, org: OrgId, tokens: Sequence[bytes], *, field: str = "leases[{}]") -> Answers:
        leases = convert.leases(tokens, field=field)
        return await self._ask_holders(leases, lambda member, at: member.store.release(org, _at(leases, at)))

    async def _ask_holders(
        self, leases: _Tokens, act: Callable[[Member, Sequence[int]], Awaitable[list[Answer]]]
    ) -> Answers:
        """Asks every shard that the tokens name about its own. A shard that is not of this cluster has no such job."""
        tags = {tag for tag, _ in leases}
        if len(tags) == 1:
            member = self._fleet.by_tag(tags.pop())
            if member is None:
                return [job_pb2.JOB_ANSWER_NOT_FOUND] * len(leases)
            told = await act(member, range(len(leases)))
            if told.count(Answer.OK) == len(told):
                return [job_pb2.JOB_ANSWER_OK] * len(told)
            return [convert.ANSWERS[answer] for answer in told]
        positions: dict[int, list[int]] = defaultdict(list)
        for at, (tag, _) in enumerate(leases):
            positions[tag].append(at)
        answers = [job_pb2.JOB_ANSWER_NOT_FOUND] * len(leases)

        async def ask(tag: int, there: Sequence[int]) -> None:
            member = self._fleet.by_tag(tag)
            if member is not None:
                for at, answer in zip(there, await act(member, there), strict=True):
                    answers[at] = convert.ANSWERS[answer]

        # All are asked to the end: which of them failed is told, and what the others did stays done.
        outcomes = await asyncio.gather(*(ask(*one) for one in positions.items()), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return answers


def _at(leases: _Tokens, positions: Sequence[int]) -> list[Lease]:
    return [leases[at][1] for at in positions]


def _nack(lease: Lease, nack: queue_pb2.Nack) -> Nack:
    delay_us = convert.micros(nack.delay) if nack.HasField("delay") else None
    return Nack(lease=lease, error=nack.error, delay_us=delay_us, kill=nack.kill)
