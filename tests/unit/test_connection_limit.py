"""Which connections are closed when a process has too many."""

from __future__ import annotations

import logging
import resource

import pytest

from router.gate.connection_limit import accepted_max, allow_files, surplus


def peers(host: str, count: int, *, first: int = 1) -> list[str]:
    return [f"ipv4:{host}:{port}" for port in range(first, first + count)]


def received(*groups: list[str], count: int = 1000) -> dict[str, int]:
    return {peer: count for group in groups for peer in group}


def test_nothing_is_closed_up_to_the_bound() -> None:
    assert surplus(received(peers("10.0.0.1", 100)), set(), 100) == []


def test_the_host_that_has_most_loses_connections_and_the_others_lose_none() -> None:
    many, few = peers("10.0.0.1", 500), peers("10.0.0.2", 40)
    closing = surplus(received(few, many), set(), 100)
    assert len(closing) == 440
    assert set(closing) <= set(many)


def test_hosts_that_have_most_are_left_with_equally_many() -> None:
    first, second, third = peers("10.0.0.1", 300), peers("10.0.0.2", 200), peers("10.0.0.3", 20)
    closing = set(surplus(received(first, second, third), set(), 100))
    assert [len(set(group) - closing) for group in (first, second, third)] == [40, 40, 20]


def test_more_hosts_than_places_lose_only_as_many_as_are_too_many() -> None:
    hosts = [peers(f"10.0.{at // 256}.{at % 256}", 1) for at in range(500)]
    assert len(surplus(received(*hosts), set(), 400)) == 100


def test_connections_without_calls_go_first_and_of_these_the_ones_that_have_sent_least() -> None:
    busy, silent, idle = (peers("10.0.0.1", 10, first=first) for first in (1, 101, 201))
    by_peer = received(busy, count=0) | received(silent, count=0) | received(idle, count=5000)
    closing = surplus(by_peer, set(busy), 5)
    assert set(closing[:10]) == set(silent)
    assert set(closing[10:20]) == set(idle)
    assert set(closing[20:]) < set(busy)


def test_the_addresses_of_one_ipv6_network_are_one_host() -> None:
    many = [f"ipv6:[2001:db8::{at:x}]:1" for at in range(1, 101)]
    others = [f"ipv6:[2001:db8:1::1]:{port}" for port in range(1, 31)]
    link_local = ["ipv6:[fe80::1%eth0]:1"]
    closing = surplus(received(others, many, link_local), set(), 61)
    assert len(closing) == 70
    assert set(closing) <= set(many)


def test_a_process_that_may_not_open_enough_files_takes_fewer_connections_and_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    allowed = allow_files(5000)
    assert accepted_max(allowed) + 1000 <= 4096
    assert set_to == [(4096, 4096)]
    assert "LimitNOFILE" in caplog.text
    caplog.clear()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, resource.RLIM_INFINITY))
    with caplog.at_level(logging.WARNING):
        assert allow_files(5000) == 5000
    assert set_to[1:] == [(7250, resource.RLIM_INFINITY)]
    assert caplog.text == ""
