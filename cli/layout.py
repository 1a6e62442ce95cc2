"""The layout of `--help`: commands in groups, and usage lines as in manual pages.

Plain text, because drawing boxes would triple the time of `windrow --help`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

# Longer than any first sentence of a help text.
_SENTENCE = 200
# Command names that users may try by mistake, each with the right command. Some names are those of other systems;
# others are names of commands in another group.
ELSEWHERE = {
    "jobs show": "jobs get",
    "queues purge": "jobs purge",
    **dict.fromkeys(("dead", "dlq"), "jobs list ORG --state dead"),
    **dict.fromkeys(("retry", "requeue", "replay"), "jobs redrive"),
    **dict.fromkeys(("delete", "remove", "kill"), "jobs cancel"),
    **dict.fromkeys(("add", "push", "publish", "send"), "enqueue"),
    **dict.fromkeys(("pop", "receive", "consume", "claim", "lease"), "dequeue"),
    **dict.fromkeys(("status", "depth", "size", "backlog"), "stats"),
    **dict.fromkeys(("token", "tokens"), "keys create"),
    "cron": "schedules",
}


class Group(TyperGroup):
    """Lists its commands below the headings in their `rich_help_panel`. For an unknown command, says which groups have
    a command of that name, or what the command is called in Windrow."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            _tell_its_place(error, ctx)
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0] if args else ""
        if name not in self.commands:
            within = [f"`{ctx.command_path} {group} {name}`" for group, one in self.commands.items() if _has(one, name)]
            if not within and (meant := ELSEWHERE.get(f"{self.name} {name}") or ELSEWHERE.get(name)):
                within = [f"`{ctx.find_root().command_path} {meant}`"]
            if within:
                ctx.fail(f"No such command {name!r}. Did you mean {' or '.join(within)}?")
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_parameters(self, ctx, formatter)
        self.format_commands(ctx, formatter)

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
                    # Show the whole first sentence, even if it needs two lines.
                    [(name.ljust(name_width), command.get_short_help_str(_SENTENCE)) for name, command in commands]
                )


def _has(command: Any, name: str) -> bool:
    return isinstance(command, Group) and name in command.commands


class Commands(Mapping[str, Any]):
    """Commands by name. A command is imported and built when it is first used, because to import and build all commands
    takes 0.3 s."""

    def __init__(self, headings: Mapping[str, Mapping[str, str]]) -> None:
        """`headings`: for each heading of `--help`, the names of the commands below it, each with its function or its
        App as MODULE:ATTRIBUTE."""
        self._places = {name: place for commands in headings.values() for name, place in commands.items()}
        self._headings = {name: heading for heading, commands in headings.items() for name in commands}
        self._built: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            self._built[name] = self._build(name)
        return self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def _build(self, name: str) -> Any:
        module, _, attribute = self._places[name].partition(":")
        found = getattr(importlib.import_module(module), attribute)
        command: Any
        if isinstance(found, App):
            command = typer.main.get_group(found)
        else:
            alone = App(add_completion=False)
            alone.command()(found)
            command = typer.main.get_command(alone)
        command.name, command.rich_help_panel = name, self._headings[name]  # pyrefly: ignore[missing-attribute]
        return command


class Command(TyperCommand):
    """Shows an argument as ORG instead of typer's {ORG}, and adds dots to an argument that can be repeated. Rewords
    typer's messages about wrong numbers."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = _readable_message(error.message)
            raise
        except Exception as error:
            _tell_its_place(error, ctx)
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [
            piece.strip("{}") + ("" if one.nargs == 1 else "...")
            for one in self.get_params(ctx)
            for piece in one.get_usage_pieces(ctx)
        ]
        return ["[OPTIONS]", *arguments]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_parameters(self, ctx, formatter)


def _tell_its_place(error: Any, ctx: Any) -> None:
    """Makes an error about an unknown option say where the option belongs. An option for all commands stands before the
    command. An option of only some of a group's commands stands after the name of a command that has it. If the user's
    command has an argument for what this option sets in other commands, the error names the argument."""
    root = ctx.find_root()
    # typer does not export the error's class.
    if type(error).__name__ != "NoSuchOption":
        return
    within = ctx.command_path.removeprefix(root.command_path).strip()
    arguments = [one.metavar for one in ctx.command.params if one.param_type_name == "argument"]
    if any(error.option_name in parameter.opts for parameter in root.command.params):
        error.message = (
            f"{error.option_name} stands before the command: {root.command_path} {error.option_name} … {within} …"
        )
    elif _is_option_within(ctx.command, error.option_name):
        error.message = (
            f"{error.option_name} stands after the command: {ctx.command_path} COMMAND … {error.option_name} …"
        )
    elif (name := error.option_name.removeprefix("--").upper()) in arguments:
        error.message = (
            f"{error.option_name} is no option of this command, but its argument {name}: see the usage above"
        )
    else:
        return
    error.possibilities = None


def _is_option_within(group: Any, option: str) -> bool:
    """Returns whether any command of a group has the option. False if `group` is a single command."""
    return isinstance(group, Group) and any(
        _is_option_within(one, option) or any(option in parameter.opts for parameter in one.params)
        for one in group.commands.values()
    )


def _write_parameters(command: Any, ctx: Any, formatter: Any) -> None:
    arguments: list[tuple[str, str]] = []
    options: list[tuple[str, str]] = []
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is None:
            continue
        name, text = record
        if parameter.param_type_name == "argument":
            arguments.append((name, text.removesuffix("[required]").rstrip()))
        else:
            options.append((name, _plain(text)))
    for heading, records in (("Arguments", arguments), ("Options", options)):
        if records:
            with formatter.section(heading):
                formatter.write_dl(records)


def _readable_message(text: str) -> str:
    """Replaces typer's messages about wrong numbers, because only programmers understand these."""
    if found := re.fullmatch(r"(\S+) is not in the range (\S+)\.", text):
        return f"{found[1]} is out of range: it must be {_plain(found[2])}"
    text = re.sub(r"is not a valid int(eger)?( range)?\.", "is not a whole number", text)
    return re.sub(r"is not a valid float( range)?\.", "is not a number", text)


def _plain(text: str) -> str:
    """Rewrites typer's notation of defaults and bounds in words."""
    text = re.sub(r"default: \(([^()]*)\)", r"default: \1", text)
    text = re.sub(r"(\d+)<=x<=(\d+)", r"\1 to \2", text)
    text = re.sub(r"x<=(\d+)", r"at most \1", text)
    return re.sub(r"x>=(\d+)", r"at least \1", text)


class App(typer.Typer):
    """A Typer with this layout."""

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
