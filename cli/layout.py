"""How `--help` is laid out: commands in groups, usage lines as manual pages write them.

Plain text: drawing boxes would take twice as long as all the rest of `windrow --help`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

_TYPE = re.compile(r" <[^>]*>$")
# Nobody writes a longer one.
_SENTENCE = 200


class Group(TyperGroup):
    """Lists its commands below the headings that `rich_help_panel` gives them."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        headings: dict[str, list[tuple[str, Any]]] = {}
        for name, command in self.commands.items():
            if not command.hidden:
                panel = getattr(command, "rich_help_panel", None)
                headings.setdefault(panel if isinstance(panel, str) else "Commands", []).append((name, command))
        name_width = max((len(name) for name in self.commands), default=0)
        for heading, commands in headings.items():
            with formatter.section(heading):
                formatter.write_dl(
                    # The first sentence, on two lines where it takes them.
                    [(name.ljust(name_width), command.get_short_help_str(_SENTENCE)) for name, command in commands]
                )


class Command(TyperCommand):
    """Writes ORG for an argument, where typer would write {ORG} <str>, and names the value that is wrong."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = _in_words(error)
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [re.sub(r"^\{(.*)\}", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        arguments: list[tuple[str, str]] = []
        options: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            name, text = record
            if parameter.param_type_name == "argument":
                arguments.append((_TYPE.sub("", name), text.removesuffix("[required]").rstrip()))
            else:
                options.append((name, _plain(text)))
        for heading, records in (("Arguments", arguments), ("Options", options)):
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def _in_words(error: typer.BadParameter) -> str:
    """Typer leaves numbers and choices to pydantic, whose words are for programmers, and lack the value."""
    cause: Any = error.__cause__
    if not hasattr(cause, "errors"):
        return error.message
    found: dict[str, Any] = cause.errors()[0]
    value, bounds = found["input"], found.get("ctx", {})
    match found["type"]:
        case "int_parsing" | "int_from_float":
            return f"{value!r} is not a whole number"
        case "float_parsing":
            return f"{value!r} is not a number"
        case "greater_than_equal":
            return f"{value} is too small: it must be at least {bounds['ge']:g}"
        case "less_than_equal":
            return f"{value} is too large: it must be at most {bounds['le']:g}"
        case _:
            return error.message.removeprefix("Value error, ")


def _plain(text: str) -> str:
    """Defaults and bounds in words."""
    text = re.sub(r"default: \(([^()]*)\)", r"default: \1", text)
    text = re.sub(r"(\d+)<=x<=(\d+)", r"\1 to \2", text)
    return re.sub(r"x>=(\d+)", r"at least \1", text)


class App(typer.Typer):
    """A Typer whose help looks so."""

    def __init__(self, *, no_args_is_help: bool = True, **settings: Any) -> None:
        super().__init__(
            cls=Group,
            no_args_is_help=no_args_is_help,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
            **settings,
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        return super().command(name, cls=Command, **settings)
