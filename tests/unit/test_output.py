"""What the command prints."""

from __future__ import annotations

import json

import pytest

from cli import output


def test_json_has_no_character_that_a_terminal_interprets_and_is_read_as_it_was(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The reason has an escape, a control sequence introducer in one character, a delete, a change of direction, and a
    # character outside the basic plane that is not printable.
    document = {"reason": "\x1b[31m \x9b31m \x7f \u202e \U000e0001", "who": "Zoë 😀"}
    output.say_json([document])
    printed = capsys.readouterr().out
    assert printed.removesuffix("\n").isprintable()
    assert json.loads(printed) == document
    assert "Zoë 😀" in printed


def test_a_line_has_no_character_that_a_terminal_interprets_whoever_chose_its_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The text may be the result of a job, or a text that a router sent as an id although it is not one.
    output.say("a result:\n\t\x1b]0;title\x07 \x9b31m \r \u202e Zoë")
    printed = capsys.readouterr().out
    assert printed == "a result:\n\t\\x1b]0;title\\x07 \\x9b31m \\r \\u202e Zoë\n"


def test_the_colours_of_a_table_are_printed_as_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    output.table([output.Column(title="state", coloured=True)], [["dead"]])
    assert "\x1b[31mdead\x1b[0m" in capsys.readouterr().out
