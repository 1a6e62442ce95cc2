"""After which statuses a client makes a call again: the contract, the pages, the programs and the client agree."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from grpc import StatusCode

from windrow.calls import FINAL

ROOT = Path(__file__).resolve().parents[2]
# More statuses after which the client does not repeat a call of Admin, Cluster or Schedules.
ANSWERS = {StatusCode.NOT_FOUND, StatusCode.ALREADY_EXISTS, StatusCode.FAILED_PRECONDITION}
UNASKED = {StatusCode.RESOURCE_EXHAUSTED}


def part(file: str, begin: str, end: str) -> str:
    """Returns the text between two strings that the file has, without comment signs such as `//`."""
    text = re.sub(r"\n *(?://|#) ?", "\n", (ROOT / file).read_text())
    _, found, rest = text.partition(begin)
    part, ended, _ = rest.partition(end)
    assert found, begin
    assert ended, end
    return part


def codes(text: str) -> set[StatusCode]:
    return {StatusCode[name] for name in re.findall(r"\b[A-Z_]{4,}\b", text) if name in StatusCode.__members__}


def test_the_contract_lists_what_ends_a_call() -> None:
    listed = part("proto/windrow/v1/queue.proto", "The rule for retries:", "It tries a unary call")
    always, unasked, answers = listed.split("\n- ")[1:]
    assert codes(always) == FINAL
    assert codes(unasked) == UNASKED
    assert codes(answers) == ANSWERS
    assert "RESOURCE_EXHAUSTED without RetryInfo, if it ended a unary call" in unasked
    assert "Admin, Cluster or Schedules" in answers


def test_the_page_about_errors_has_the_rule_of_the_contract() -> None:
    table = part("docs/errors.md", "| not again after | because |\n|---|---|\n", "\n\n")
    always, unasked, answers = table.splitlines()
    assert codes(always) == FINAL
    assert codes(unasked) == UNASKED
    assert codes(answers) == ANSWERS


@pytest.mark.parametrize(
    ("file", "begin", "end"),
    [
        ("docs/streams.md", "**Connect again after every status except these four:**", "They do not change"),
        ("docs/streams.md", "FATAL = {", "}"),
        ("docs/clients.md", "**every status except", "**"),
        ("examples/clients/java/src/main/java/com/example/Cards.java", "Set<Status.Code> FINAL =", ";"),
        ("examples/clients/grpc-js/src/main.ts", "const FINAL = new Set([", "]"),
    ],
)
def test_pages_and_examples_name_the_four_that_end_a_call_everywhere(file: str, begin: str, end: str) -> None:
    assert codes(part(file, begin, end)) == FINAL


def test_the_page_about_other_languages_names_what_else_ends_calls_of_the_other_services() -> None:
    begin = "Calls of `Admin`, `Cluster`, `Schedules` and `Workflows` also end with"
    assert codes(part("docs/clients.md", begin, ".")) == ANSWERS


def test_grpc_itself_repeats_nothing_that_the_rule_does_not_repeat() -> None:
    (policy,) = json.loads((ROOT / "proto/windrow/v1/service_config.json").read_text())["methodConfig"]
    repeated = {StatusCode[name] for name in policy["retryPolicy"]["retryableStatusCodes"]}
    assert repeated
    assert not repeated & (FINAL | UNASKED | ANSWERS)
