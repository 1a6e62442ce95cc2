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
