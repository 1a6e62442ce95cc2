# ruff: noqa: N802 - the verbs are named by the contract
"""Tests of calls by operators. The client must not make these calls twice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from grpc import StatusCode, aio

from tests.unit.client_fake import refuse
from windrow import Client, DeadlineExceeded, PermissionDenied, RouterError, Unavailable, WindrowError
from windrow.v1 import admin_pb2
from windrow.v1.admin_pb2_grpc import AdminServicer, add_AdminServicer_to_server


class FakeAdmin:
    """A service whose queue has 5,000 jobs to purge and to redrive. `steps` has the limit of each call. The call with
    the number `fails_at` fails."""

    def __init__(self, code: StatusCode, fails_at: int, reason: str = "SHARD_UNAVAILABLE") -> None:
        self.code = code
        self.reason = reason
        self.fails_at = fails_at
        self.steps: list[int] = []
        for method in admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods:
            # A gRPC server needs an attribute for each method.
            if not hasattr(self, method.name):
                setattr(self, method.name, None)

    async def GetStats(self, request: admin_pb2.GetStatsRequest, _: Any) -> admin_pb2.GetStatsResponse:
        return admin_pb2.GetStatsResponse(queues=[admin_pb2.QueueStats(queue=request.queue, dead=5000)])

    async def PurgeQueue(self, request: admin_pb2.PurgeQueueRequest, context: Any) -> admin_pb2.PurgeQueueResponse:
        await self._step(request.limit, context)
        return admin_pb2.PurgeQueueResponse(cancelled=request.limit, limit_reached=True)

    async def RedriveQueue(
        self, request: admin_pb2.RedriveQueueRequest, context: Any
    ) -> admin_pb2.RedriveQueueResponse:
        await self._step(request.limit, context)
        return admin_pb2.RedriveQueueResponse(redriven=request.limit, limit_reached=True)

    async def _step(self, limit: int, context: Any) -> None:
        self.steps.append(limit)
        if len(self.steps) == self.fails_at:
            # The error makes it look as if the answer were lost.
            await refuse(context, self.code, "lost", reason=self.reason, retry_after_s=0.01)


@pytest.fixture
async def port() -> AsyncIterator[tuple[aio.Server, int]]:
    server = aio.server()
    yield server, server.add_insecure_port("127.0.0.1:0")
    await server.stop(None)


@pytest.mark.parametrize(
    ("code", "raised"),
    [
        (StatusCode.UNAVAILABLE, Unavailable),
        (StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (StatusCode.INTERNAL, RouterError),
    ],
)
@pytest.mark.parametrize(("method", "done"), [("purge_queue", "cancelled"), ("redrive_queue", "redriven")])
async def test_a_purge_or_redrive_that_may_have_been_done_is_not_repeated_and_says_so(
    port: tuple[aio.Server, int], method: str, done: str, code: StatusCode, raised: type[WindrowError]
) -> None:
    admin = FakeAdmin(code, fails_at=2)
    server, number = port
    add_AdminServicer_to_server(cast("AdminServicer", admin), server)
    await server.start()
    async with Client(f"127.0.0.1:{number}", org="acme") as client:
        with pytest.raises(raised) as error:
            await getattr(client, method)("q", limit=1700)
        assert admin.steps == [1000, 700]
        doubt = f"; 1,000 jobs were {done} before, and this call may have {done} up to 700 more: check the counts, "
        assert str(error.value).endswith(f"{doubt}then call again")
        assert error.value.details == f"lost{doubt}then call again"
        assert error.value.reason == "SHARD_UNAVAILABLE"
        assert await getattr(client, method)("q", limit=1700) == 1700


@pytest.mark.parametrize("method", ["purge_queue", "redrive_queue"])
async def test_a_purge_or_redrive_goes_on_after_a_refusal_by_which_nothing_was_done(
    port: tuple[aio.Server, int], method: str
) -> None:
    admin = FakeAdmin(StatusCode.RESOURCE_EXHAUSTED, fails_at=2, reason="TOO_MANY_CHANGES")
    server, number = port
    add_AdminServicer_to_server(cast("AdminServicer", admin), server)
    await server.start()
    async with Client(f"127.0.0.1:{number}", org="acme") as client:
        assert await getattr(client, method)("q", limit=1700) == 1700
        assert admin.steps == [1000, 700, 700]


@pytest.mark.parametrize("method", ["purge_queue", "redrive_queue"])
async def test_a_purge_or_redrive_that_is_refused_midway_says_what_was_done_before(
    port: tuple[aio.Server, int], method: str
) -> None:
    admin = FakeAdmin(StatusCode.PERMISSION_DENIED, fails_at=2, reason="SCOPE_MISSING")
    server, number = port
    add_AdminServicer_to_server(cast("AdminServicer", admin), server)
    await server.start()
    async with Client(f"127.0.0.1:{number}", org="acme") as client:
        with pytest.raises(PermissionDenied, match=r"; 1,000 jobs were (cancelled|redriven) before$"):
            await getattr(client, method)("q", limit=1700)
