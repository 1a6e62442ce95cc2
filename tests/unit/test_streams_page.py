"""The consumer of docs/streams.md, against a router that refuses messages. tests/e2e/test_readme.py runs it against a
cluster."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from google.rpc.status_pb2 import Status
from grpc import StatusCode

from tests.unit.client_fake import FakeRouter
from windrow.v1 import queue_pb2

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/streams.md").read_text(), re.DOTALL | re.MULTILINE)[0]


def refused(code: StatusCode) -> queue_pb2.Settled:
    return queue_pb2.Settled(error=Status(code=code.value[0], message="no"))


async def work(router: FakeRouter) -> None:
    """Runs the program, which enqueues three jobs and asks for them."""
    environ = os.environ | {"WINDROW_ADDRESS": router.address}
    # All jobs come in one message, and so do their acks.
    for name in (b"ada", b"grace", b"barbara"):
        router.give("letter", name)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()


def leases(messages: list[queue_pb2.ConsumeRequest]) -> list[list[bytes]]:
    return [[ack.lease for ack in message.acks] for message in messages if message.acks]


async def test_a_message_that_is_too_large_is_sent_again_in_parts(router: FakeRouter) -> None:
    async def take_one_ack(message: queue_pb2.ConsumeRequest, _: Any) -> queue_pb2.Settled:
        return queue_pb2.Settled() if len(message.acks) == 1 else refused(StatusCode.INVALID_ARGUMENT)

    router.scripts["Settle"] = take_one_ack
    await work(router)
    first, *parts = leases(router.stream.messages)
    assert len(first) == 3
    assert parts == [[lease] for lease in first]
    # The program gives credit for ten jobs, and one more for each job that it has worked.
    assert sum(message.credit for message in router.stream.messages) == 10 + 3


@pytest.mark.parametrize("code", [StatusCode.UNAVAILABLE, StatusCode.RESOURCE_EXHAUSTED])
async def test_a_message_without_an_answer_is_sent_again_as_it_was(router: FakeRouter, code: StatusCode) -> None:
    answers = [refused(code)]

    async def refuse_once(message: queue_pb2.ConsumeRequest, _: Any) -> queue_pb2.Settled:
        return answers.pop() if answers else queue_pb2.Settled()

    router.scripts["Settle"] = refuse_once
    await work(router)
    first, again = leases(router.stream.messages)
    assert first == again
