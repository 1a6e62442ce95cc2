"""Generates docs/cli.md from the commands and docs/cli.md.in, the table of scopes in SECURITY.md from the contract, and
the options of new jobs in the README of the Python client from NewJob. With --check, changes nothing and only reports
whether these texts are up to date.

A line `{{windrow …}}` of the template becomes the reference of that command: heading, usage, help, options and their
defaults. After these comes the part of the command's docstring after a form feed, such as an example; `--help` leaves
this part out. A command that the template does not name is put after its predecessor in the list of commands. A line
`{{keys of …}}` becomes the JSON keys of a job, a schedule or a queue. The template adds what the commands do not
contain: examples with their output, and the JSON keys of other things.
"""

import importlib
import inspect
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

from cli.exits import MEANINGS  # noqa: E402  (the checkout is not on the path when this file runs as a script)
from cli.main import commands  # noqa: E402
from cli.messages import job_json  # noqa: E402
from cli.queues import queue_json  # noqa: E402
from cli.schedule_output import schedule_json  # noqa: E402
from router.gate.auth.access import access_of  # noqa: E402
from router.gate.auth.scopes import Scope  # noqa: E402
from windrow.new_jobs import NewJob  # noqa: E402
from windrow.v1 import admin_pb2, job_pb2, schedules_pb2  # noqa: E402

TEMPLATE = DOCS / "cli.md.in"
PAGE = DOCS / "cli.md"
SECURITY = ROOT / "SECURITY.md"
CLIENT = ROOT / "clients/python/README.md"
INCLUDE = re.compile(r"^\{\{(.+)\}\}$", re.MULTILINE)
# The beginning of the page explains these parameters. If a parameter has another meaning in a command, the table of
# this command explains it.
SHARED = ("ORG", "--config", "--address", "--timeout", "--json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    name: str
    meaning: str
    default: str

    @property
    def row(self) -> str:
        return f"| `{self.name}` | {self.meaning} | {self.default} |"

    @property
    def flag(self) -> str:
        return self.name.split()[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What a command declares. `more`: the text that follows the help of the command on the page."""

    name: str
    usage: str
    help: str
    parameters: tuple[Parameter, ...]
    more: str

    def page(self, shared: dict[str, Parameter]) -> str:
        own = [one for one in self.parameters if shared.get(one.flag) != one]
        also = [f"`{one.flag}`" for one in self.parameters if shared.get(one.flag) == one and one.flag != "ORG"]
        lines = [f"### {self.name}", "", f"`{self.usage}`", "", self.help]
        if own:
            lines += ["", *table(own)]
        if also:
            lines += ["", f"{'Also' if own else 'Takes'} {', '.join(also)}."]
        if self.more:
            lines += ["", self.more]
        return "\n".join(lines)


def table(parameters: list[Parameter]) -> list[str]:
    return ["| | | default |", "|---|---|---|", *(one.row for one in parameters)]


def references(command: Any, name: str, parent: Any = None) -> Iterator[Reference]:
    """Yields the references of a command and of its subcommands. A group that only lists its commands has no reference
    of its own."""
    context = typer.Context(command, info_name=name, parent=parent)
    below = getattr(command, "commands", {})
    if not below or command.invoke_without_command:
        text, _, more = inspect.cleandoc(command.help).partition("\f")
        pieces = [piece for piece in command.collect_usage_pieces(context) if piece != "COMMAND [ARGS]..."]
        yield Reference(
            name=context.command_path.removeprefix("windrow "),
            usage=" ".join([context.command_path, *pieces]).replace("[OPTIONS]", "[options]"),
            help="\n\n".join(map(wrapped, text.strip().split("\n\n"))),
            parameters=tuple(parameters(command, context)),
            more=more.strip(),
        )
    for word, one in below.items():
        yield from references(one, word, context)


def parameters(command: Any, context: Any) -> Iterator[Parameter]:
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None or parameter.name == "help":
            continue
        name, text = record
        meaning, _, notes = text.partition("  [")
        default = ""
        for note in filter(None, notes.removesuffix("]").split("; ")):
            what, colon, value = note.partition(": ")
            if what == "default":
                # If a default is not a value but a description, Typer shows it in parentheses.
                default = re.sub(r"^\((.*)\)$", r"\1", value)
            elif what == "env var":
                meaning += f" Or set `{value}`."
            elif what == "required" and not colon:
                default = "required"
            else:
                meaning += f" {bounds(note)}."
        if parameter.param_type_name == "argument":
            name, default = re.sub(r" <[^>]*>$", "", name).strip("[]"), "required" if parameter.required else ""
        yield Parameter(name=name, meaning=escaped(meaning), default=escaped(default))


def wrapped(paragraph: str) -> str:
    return textwrap.fill(escaped(" ".join(paragraph.split())), 120, break_long_words=False, break_on_hyphens=False)


def bounds(note: str) -> str:
    return re.sub(r"x>=(\d+)", r"At least \1", re.sub(r"(\d+)<=x<=(\d+)", r"\1 to \2", note))


def escaped(text: str) -> str:
    """Quotes option names, `|` and `~`, which Markdown would otherwise read as markup."""
    quoted = re.sub(r"(?<![`\w-])(--[a-z][a-z-]*)", r"`\1`", text)
    return quoted.replace("|", "\\|").replace("~", "\\~")


def json_keys() -> Iterator[tuple[str, str]]:
    """Yields the name of each list of keys, and the list."""
    job = job_pb2.Job()
    job.retry.fixed.SetInParent()
    documents = {
        "a job": job_json(job, payloads=False),
        "a leased job": job_json(job_pb2.LeasedJob(), payloads=True),
        "a schedule": schedule_json(schedules_pb2.ScheduleInfo()),
        "a queue": queue_json(admin_pb2.QueueInfo()),
    }
    for what, document in documents.items():
        yield f"keys of {what}", wrapped(", ".join(f"`{key}`" for key in document) + ".")


def with_every_command(template: str, names: Iterable[str]) -> str:
    """Adds the commands that the template does not name, each after its predecessor in `names`."""
    for before, name in pairwise(names):
        if f"{{{{windrow {name}}}}}" not in template:
            section = rf"^(\{{\{{windrow {before}\}}\}}.*?)\n*(?=^## |^\{{\{{windrow |\Z)"
            added = rf"\1\n\n{{{{windrow {name}}}}}\n\n"
            template = re.sub(section, added, template, flags=re.DOTALL | re.MULTILINE)
    return template


def contents(page: str) -> str:
    """Returns a table of the page's sections, each with its commands. The name of a group is shown only at the first of
    the group's commands."""
    rows = ["| to do what | commands |", "|---|---|"]
    for section in page.split("\n## ")[1:]:
        names = re.findall(r"^### (.+)$", section, re.MULTILINE)
        groups = [name.rpartition(" ")[0] for name in names]
        shown = [
            link(name.removeprefix(f"{group} ") if group == before else name, to=name)
            for name, group, before in zip(names, groups, ["", *groups], strict=False)
        ]
        heading, _, _ = section.partition("\n")
        if shown:
            rows.append(f"| {link(heading, to=heading)} | {', '.join(shown)} |")
    return "\n".join(rows)


def link(text: str, *, to: str) -> str:
    return f"[{text}](#{re.sub('[^a-z -]', '', to.lower()).replace(' ', '-')})"


def generate() -> str:
    found = {one.name: one for one in references(commands(), "windrow")}
    every = Counter(parameter for one in found.values() for parameter in one.parameters if parameter.flag in SHARED)
    shared = {flag: max((one for one in every if one.flag == flag), key=every.__getitem__) for flag in SHARED}
    pages = {f"windrow {name}": one.page(shared) for name, one in found.items()}
    pages["options"] = "\n".join(table(list(shared.values())))
    pages["exit codes"] = "\n".join(
        ["| | |", "|---|---|", *(f"| {code} | {text} |" for code, text in MEANINGS.items())]
    )
    pages.update(json_keys())
    template = with_every_command(TEMPLATE.read_text(), found)
    pages["contents"] = ""
    used = Counter(INCLUDE.findall(template))
    if wrong := sorted(name for name in {*pages, *used} if name not in pages or used[name] != 1):
        sys.exit(f"{TEMPLATE.name} must name each of these once, and nothing else: {', '.join(wrong)}")
    pages["contents"] = contents(INCLUDE.sub(lambda match: pages[match[1]], template))
    body = INCLUDE.sub(lambda match: pages[match[1]], template)
    return f"<!-- Generated by ./run gen from the commands and {TEMPLATE.name}: edit those. -->\n\n{body}"


def scopes() -> str:
    """Returns a table: for each scope, the methods that it allows."""
    allowed: dict[Scope | None, list[str]] = {scope: [] for scope in (*Scope, None)}
    for proto in sorted((ROOT / "proto/windrow/v1").glob("*.proto")):
        module: Any = importlib.import_module(f"windrow.v1.{proto.stem}_pb2")
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                allowed[access_of(method).scope].append(method.name)
    rows = (f"| {f'`{scope}`' if scope else 'any'} | {', '.join(names)} |\n" for scope, names in allowed.items())
    return "".join(["| scope | allows |\n", "|---|---|\n", *rows])


def options() -> str:
    """Returns the list of options in the docstring of `NewJob`."""
    text = inspect.cleandoc(NewJob.__doc__ or "")
    return text[text.index("- `attributes`") :] + "\n"


def filled(page: Path, place: str, text: str) -> str:
    """Returns the page with `text` between `<!-- PLACE -->` and `<!-- end -->`."""
    between = re.compile(rf"(?<=<!-- {place} -->\n).*?(?=<!-- end -->)", re.DOTALL)
    fresh, found = between.subn(lambda _: text, page.read_text())
    if found != 1:
        sys.exit(f"{page.relative_to(ROOT)} must have one place `{place}`")
    return fresh


def main() -> int:
    pages = {
        PAGE: generate(),
        SECURITY: filled(SECURITY, "table scopes", scopes()),
        CLIENT: filled(CLIENT, "options of NewJob", options()),
    }
    old = [page for page, fresh in pages.items() if not page.exists() or page.read_text() != fresh]
    for page in old:
        name = page.relative_to(ROOT)
        if "--check" in sys.argv[1:]:
            print(f"{name} is not what ./run gen writes: run it")
        else:
            page.write_text(pages[page])
            print(name)
    return int("--check" in sys.argv[1:] and bool(old))


if __name__ == "__main__":
    sys.exit(main())
