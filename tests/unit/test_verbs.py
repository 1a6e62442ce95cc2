"""No verb is forgotten in a place that names every verb (CONTRIBUTING.md, "To add a verb")."""

from __future__ import annotations

import cli.leases
import tests.verbs
from router.codec.lease_verbs import VERBS
from shard.queue import settle
from windrow import Client, SyncClient
from windrow.v1 import queue_pb2

NAMES = {verb.method.lower() for verb in VERBS}


def test_each_list_of_a_stream_message_belongs_to_a_verb() -> None:
    lists = [field.name for field in queue_pb2.ConsumeRequest.DESCRIPTOR.fields if field.is_repeated]
    assert sorted(verb.stream_field for verb in VERBS) == sorted(lists)


def test_shards_the_client_the_command_and_the_tests_about_each_verb_have_every_verb() -> None:
    assert settle.VERBS.keys() == NAMES
    # The tests also have a nack that makes jobs dead.
    assert tests.verbs.VERBS.keys() - {"kill"} == NAMES
    assert set(cli.leases.COMMANDS) >= NAMES
    for client in (Client, SyncClient):
        assert set(dir(client)) >= NAMES
