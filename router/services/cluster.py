"""Calls about the whole cluster, for its operators: its shards and their books, and the figures, limits and weights of
all orgs (proto/windrow/v1/cluster.proto)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

from router.codec import convert
from router.codec.org_limits import limit_key, limit_message
from router.codec.status import InvalidRequest, Violation
from router.fleet.fleet import Fleet
from router.fleet.reload import Reloader
from router.fleet.shard_handle import ShardHandle
from router.gate.calls import ANSWER_HELD_BYTES, DEADLINE_S_MAX, SMALL_ANSWER_BYTES, streamed_answer, unary
from router.route.all_orgs import list_orgs
from shard.admin import limits, weights
from shard.admin.queue_admin import OrgBooks
from shard.errors import DiskFull, ShardError, ShardUnavailable
from shard.placement.catalog import Catalog, Holding
from shard.vocabulary import OrgId, ShardName
from windrow.v1 import cluster_pb2

_BOOKS_A_MESSAGE = 500
_PROBE_S = 2.0
_STANDBY = (
    "its server is a standby, which takes no changes; target_session_attrs=read-write in the DSN finds the primary"
)
_PAGE_DEFAULT = 100


class ClusterService:
    service_name = "windrow.v1.Cluster"

    def __init__(self, fleet: Fleet, reloader: Reloader) -> None:
        self._fleet = fleet
        self._reloader = reloader

    @unary(answer_bytes=ANSWER_HELD_BYTES)
    async def ListShards(self, request: cluster_pb2.ListShardsRequest) -> cluster_pb2.ListShardsResponse:
        members, holdings = self._fleet.shards(), self._fleet.holdings()
        shards = await asyncio.gather(
            *(self._probe(member, holdings.get(name, Holding())) for name, member in members.items())
        )
        unnamed = [_not_in_file(name, holding) for name, holding in holdings.items() if name not in members]
        return cluster_pb2.ListShardsResponse(shards=[*shards, *unnamed], cluster_file=self._cluster_file())

    @streamed_answer(answer_bytes=ANSWER_HELD_BYTES, deadline_s=5 * DEADLINE_S_MAX)
    async def CheckShard(
        self, request: cluster_pb2.CheckShardRequest
    ) -> AsyncGenerator[cluster_pb2.CheckShardResponse, None]:
        member = self._fleet.member(request.shard)
        before = await self._fleet.newest_catalog()
        books = await member.queue_admin.check()
        faults = await member.workflows.check()
        after = await self._fleet.newest_catalog()
        homes = _homes_of_strays(member.name, books, before, after)
        for at in range(0, len(books), _BOOKS_A_MESSAGE):
            yield cluster_pb2.CheckShardResponse(
                orgs=[
                    convert.org_books(org_books, home_shard=homes.get(org_books.org, ""))
                    for org_books in books[at : at + _BOOKS_A_MESSAGE]
                ]
            )
        if faults:
            yield cluster_pb2.CheckShardResponse(workflow_faults=map(convert.workflow_fault, faults))

    @unary(answer_bytes=ANSWER_HELD_BYTES)
    async def ListOrgs(self, request: cluster_pb2.ListOrgsRequest) -> cluster_pb2.ListOrgsResponse:
        found = await list_orgs(
            self._fleet,
            convert.wanted_orgs(request),
            shard=ShardName(request.shard) if request.shard else None,
            page_size=request.page_size or _PAGE_DEFAULT,
            page_token=request.page_token,
        )
        answer = cluster_pb2.ListOrgsResponse(
            orgs=[convert.org_figures(figures, shards) for figures, shards in found.orgs],
            next_page_token=found.next_page_token,
            unavailable_shards=found.unavailable,
        )
        if found.age_us is not None:
            answer.age.CopyFrom(convert.duration(found.age_us))
        return answer

    @unary(answer_bytes=SMALL_ANSWER_BYTES)
    async def SetLimit(self, request: cluster_pb2.SetLimitRequest) -> cluster_pb2.SetLimitResponse:
        key, interval_us = limit_key(request), convert.micros(request.interval)
        if key.measure.has_interval != request.HasField("interval"):
            why = "is missing" if key.measure.has_interval else f"is given: a limit of {key.measure} has none"
            raise InvalidRequest([Violation("interval", why)])
        limit = await limits.set_limit(
            self._fleet.catalog_database, key, amount=request.amount, interval_us=interval_us
        )
        return cluster_pb2.SetLimitResponse(limit=limit_message(limit))

    @unary(answer_bytes=SMALL_ANSWER_BYTES)
    async def ClearLimit(self, request: cluster_pb2.ClearLimitRequest) -> cluster_pb2.ClearLimitResponse:
        cleared = await limits.clear(self._fleet.catalog_database, limit_key(request))
        return cluster_pb2.ClearLimitResponse(cleared=cleared)

    @unary(answer_bytes=ANSWER_HELD_BYTES)
    async def ListAllLimits(self, request: cluster_pb2.ListAllLimitsRequest) -> cluster_pb2.ListAllLimitsResponse:
        table = await self._fleet.newest_limits()
        return cluster_pb2.ListAllLimitsResponse(
            limits=[limit_message(table.limits[key]) for key in sorted(table.limits)]
        )

    @unary(answer_bytes=SMALL_ANSWER_BYTES)
    async def SetWeight(self, request: cluster_pb2.SetWeightRequest) -> cluster_pb2.SetWeightResponse:
        await weights.set_weight(self._fleet.catalog_database, OrgId(request.org), request.weight)
        return cluster_pb2.SetWeightResponse()

    @unary(answer_bytes=ANSWER_HELD_BYTES)
    async def ListWeights(self, request: cluster_pb2.ListWeightsRequest) -> cluster_pb2.ListWeightsResponse:
        table = await self._fleet.newest_weights()
        return cluster_pb2.ListWeightsResponse(
            weights=[cluster_pb2.OrgWeight(org=org, weight=weight) for org, weight in table.of.items()]
        )

    async def _probe(self, member: ShardHandle, holding: Holding) -> cluster_pb2.ShardInfo:
        """Returns one shard's state. Errors of the shard go into the result and are not raised."""
        entry = member.entry
        info = _info(entry.name, holding, error=member.trouble)
        info.state, info.weight = convert.SHARD_STATES[entry.state], entry.weight
        info.labels.update(entry.labels)
        try:
            began = time.perf_counter()
            async with asyncio.timeout(_PROBE_S):
                versions = await member.require_up().queue_admin.versions()
                info.postgres_version, info.schema_version, is_standby = versions
                info.latency.CopyFrom(convert.duration(round((time.perf_counter() - began) * 1e6)))
                # A shard whose clock was set back is not usable, although it answers.
                member.store.clock.check()
                if is_standby and entry.state.takes_changes:
                    raise ShardUnavailable(entry.name, _STANDBY)
                info.reachable = True
                await member.queue_admin.probe_disk()
        except DiskFull as error:
            info.disk_full, info.error = True, str(error)
        except TimeoutError:
            info.error = f"no answer within {_PROBE_S:g} s"
        except ShardError as error:
            info.error = str(error)
        return info

    def _cluster_file(self) -> cluster_pb2.ClusterFile:
        current = self._reloader
        file = cluster_pb2.ClusterFile(digest=current.cluster.digest, needs_restart=current.needs_restart)
        file.used_since.FromDatetime(current.since)
        if current.refusal is not None:
            file.refusal.reason, file.refusal.digest = current.refusal.why, current.refusal.digest
            file.refusal.last_tried_at.FromDatetime(current.refusal.at)
        return file


def _homes_of_strays(
    shard: ShardName, books: Sequence[OrgBooks], before: Catalog, after: Catalog
) -> dict[str, ShardName]:
    """Finds orgs that have unfinished jobs on this shard, although routers do not read jobs of these orgs there.
    Returns for each such org the shard where these jobs belong. `before` and `after` are the catalog before and after
    the count: an org that moved in between is left out."""
    homes: dict[str, ShardName] = {}
    for org_books in books:
        org = OrgId(org_books.org)
        placement = after.placement(org)
        # An org that is being erased has a name that begins with this character (shard/history/erasure.py).
        if org_books.unfinished and shard not in placement.reads and not org.startswith("\x7f"):
            old = before.placement(org)
            if (old.epoch, old.reads) == (placement.epoch, placement.reads):
                homes[org_books.org] = placement.writes[0]
    return homes


def _not_in_file(name: ShardName, holding: Holding) -> cluster_pb2.ShardInfo:
    info = _info(name, holding, error="the cluster file of this router does not name it")
    info.state = cluster_pb2.SHARD_STATE_NOT_IN_FILE
    return info


def _info(name: ShardName, holding: Holding, *, error: str) -> cluster_pb2.ShardInfo:
    return cluster_pb2.ShardInfo(
        name=name, slots=holding.slots, leaving_slots=holding.leaving, pinned_orgs=holding.pins, error=error
    )
