"""Ack, nack, extend and release: from lease tokens to the shards that the tokens name, and back to answers."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from uuid import UUID

from router import convert
from router.fleet import Fleet
from router.lookups import decide
from router.member import Member
from shard.settling import Nack
from shard.vocabulary import Answer, JobId, Lease, OrgId
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
            return await self._ask_holders(org, leases, lambda member, at: member.store.ack(org, _at(leases, at)))
        return await self._ask_holders(
            org, leases, lambda member, at: member.store.ack(org, _at(leases, at), [results[one] for one in at])
        )

    async def nack(self, org: OrgId, nacks: Sequence[queue_pb2.Nack]) -> Answers:
        leases = convert.leases([nack.lease for nack in nacks], field="nacks[{}].lease")
        return await self._ask_holders(
            org, leases, lambda member, at: member.store.nack(org, [_nack(leases[one][1], nacks[one]) for one in at])
        )

    async def extend(
        self, org: OrgId, tokens: Sequence[bytes], *, window_us: int, field: str = "leases[{}]"
    ) -> Answers:
        leases = convert.leases(tokens, field=field)
        return await self._ask_holders(
            org, leases, lambda member, at: member.store.extend(org, _at(leases, at), window_us=window_us)
        )

    async def release(self, org: OrgId, tokens: Sequence[bytes], *, field: str = "leases[{}]") -> Answers:
        leases = convert.leases(tokens, field=field)
        return await self._ask_holders(org, leases, lambda member, at: member.store.release(org, _at(leases, at)))

    async def _ask_holders(
        self, org: OrgId, leases: _Tokens, act: Callable[[Member, Sequence[int]], Awaitable[list[Answer]]]
    ) -> Answers:
        """Asks every shard that the tokens name about its own. A job of which that shard knows nothing may have gone to
        another one since its lease ended; its history, which tells how that was, has gone with it."""
        tags = {tag for tag, _ in leases}
        told = (
            await self._ask_one(tags.pop(), range(len(leases)), act) if len(tags) == 1 else await self._ask(leases, act)
        )
        if told.count(Answer.OK) == len(told):
            return [job_pb2.JOB_ANSWER_OK] * len(told)
        lost = [at for at, answer in enumerate(told) if answer is Answer.NOT_FOUND]
        if lost:
            ids = [JobId(str(UUID(hex=leases[at][1].job_hex))) for at in lost]
            found = await decide(
                self._fleet, org, ids, lambda member, there: act(member, [lost[position] for position in there])
            )
            for at, answer in zip(lost, found, strict=True):
                told[at] = answer
        return [convert.ANSWERS[answer] for answer in told]

    async def _ask(
        self, leases: _Tokens, act: Callable[[Member, Sequence[int]], Awaitable[list[Answer]]]
    ) -> list[Answer]:
        positions: dict[int, list[int]] = defaultdict(list)
        for at, (tag, _) in enumerate(leases):
            positions[tag].append(at)
        told = [Answer.NOT_FOUND] * len(leases)
        # All are asked to the end: which of them failed is told, and what the others did stays done.
        outcomes = await asyncio.gather(
            *(self._ask_one(tag, there, act) for tag, there in positions.items()), return_exceptions=True
        )
        for there, outcome in zip(positions.values(), outcomes, strict=True):
            if isinstance(outcome, BaseException):
                raise outcome
            for at, answer in zip(there, outcome, strict=True):
                told[at] = answer
        return told

    async def _ask_one(
        self, tag: int, there: Sequence[int], act: Callable[[Member, Sequence[int]], Awaitable[list[Answer]]]
    ) -> list[Answer]:
        """A shard that is not of this cluster has no such job."""
        member = self._fleet.by_tag(tag)
        return [Answer.NOT_FOUND] * len(there) if member is None else await act(member, there)


def _at(leases: _Tokens, positions: Sequence[int]) -> list[Lease]:
    return [leases[at][1] for at in positions]


def _nack(lease: Lease, nack: queue_pb2.Nack) -> Nack:
    delay_us = convert.micros(nack.delay) if nack.HasField("delay") else None
    return Nack(lease=lease, error=nack.error, delay_us=delay_us, kill=nack.kill)
