"""Each `windrow …` command that a page names exists, with its options and arguments. The tests do not run the
commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from cli.main import commands
from tests.unit.test_docs import CODE, FENCE, HISTORY, PAGES, ROOT, prose

# A decision names the commands that existed at its time.
READ = [page for page in PAGES if page not in HISTORY and not page.startswith("docs/decisions/")]
# A command is at the beginning of a line, after another program, or after a variable that is set for the command.
COMMAND = re.compile(r"(?:^|\| |exec \w+ |[A-Z_]+=\S+ )(?:\./run )?windrow (?=[a-z-])(.*)")
# SHELL: the characters that end a command in a shell. LEFT_OUT: the texts that stand for what a page leaves out.
SHELL, LEFT_OUT = re.compile(r"[|<>;&()]+"), re.compile(r"…|\[options\]|COMMAND")
AN_ID = "019a9f5e-7c1d-7a41-8f0e-3f2b6d1c9a55"
UsageError: Any = typer.BadParameter.__mro__[1]


def of_fences(page: str) -> Iterator[str]:
    """Yields the commands of code blocks: each line of a shell block, and each line after a `$` of a console block."""
    for fence in FENCE.finditer((ROOT / page).read_text()):
        first, *lines = re.sub(r"\s*\\\n", " ", fence[0]).splitlines()
        yield from (line.removeprefix("$ ") for line in lines if first in {"```", "```sh"} or line.startswith("$ "))


def of_prose(page: str) -> Iterator[str]:
    yield from (" ".join(code.strip("`").split()) for code in CODE.findall(prose(page)))


def words(text: str) -> list[str] | None:
    """Returns the words after `windrow`. Returns None if the text has no `windrow` command, or leaves out some words of
    the command."""
    if not (found := COMMAND.search(text)) or LEFT_OUT.search(found[1]):
        return None
    lexer = shlex.shlex(found[1], posix=True, punctuation_chars="|<>;&()")
    lexer.whitespace_split = True
    given: list[str] = []
    for word in lexer:
        if SHELL.fullmatch(word):
            break
        given.append(word)
    return given


def fault_of(given: list[str], *, in_prose: bool) -> str | None:
    """Returns what is wrong with a command, or None. Prose may name only the command and options, without their
    values."""
    command: Any = commands()
    context: Any = typer.Context(command, info_name="windrow")
    try:
        while hasattr(command, "commands"):
            _, rest, _ = command.make_parser(context).parse_args(list(given))
            if not rest:
                break  # A mention of `windrow shards`, or of a group.
            name, command, given = command.resolve_command(context, rest)
            context = typer.Context(command, info_name=name, parent=context)
        if in_prose and (not given or given[0].startswith("-")):
            known = {name for one in command.get_params(context) for name in (*one.opts, *one.secondary_opts)}
            unknown = [word for word in given if word.startswith("-") and word not in known]
            return f"no such option: {unknown[0]}" if unknown else None
        # Some commands parse the ids that they take.
        given = [AN_ID if word == "ID" else word for word in given]
        context = command.make_context(context.info_name, given, parent=context.parent)
    except typer.Exit:
        return None  # An option that needs no command, such as --version.
    except UsageError as error:
        if "does not exist" in str(error):
            return None  # The reader has made this file.
        left_out = type(error).__name__ == "MissingParameter" and error.param.param_type_name == "option"
        return None if in_prose and left_out else str(error)
    for argument in command.params:
        if argument.param_type_name == "argument":
            values = context.params[argument.name]
            for value in values if isinstance(values, tuple) else [values]:
                if isinstance(value, str) and re.fullmatch("[A-Z]+", value) and value != argument.metavar:
                    return f"{value} stands where the command takes {argument.metavar}"
    return None


@pytest.mark.parametrize("page", READ)
def test_every_command_that_a_page_names_exists_with_its_options_and_arguments(page: str) -> None:
    named = [(text, False) for text in of_fences(page)] + [(text, True) for text in of_prose(page)]
    faults = [
        f"{text}: {fault}"
        for text, in_prose in named
        if (given := words(text)) is not None and (fault := fault_of(given, in_prose=in_prose))
    ]
    assert not faults
