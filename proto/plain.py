"""Writes copies of the .proto files that do not import protovalidate, for generators of any language.

The rules of protovalidate are options that buf/validate/validate.proto defines. If a file uses these options, code
generated from it can only be linked together with the code of validate.proto. Routers check every request, so a client
does not need the rules. The copies contain everything else, also the comments and google/rpc. This module needs only
Python's standard library, because people who generate a client may not have installed Windrow.
"""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

PROTO = Path(__file__).resolve().parent
RULES = "buf/validate/validate.proto"
OURS = "windrow/v1/*.proto"
AS_THEY_ARE = ("google/rpc/*.proto", "windrow/v1/*.json")

# A token: a comment, a string, white space, a word, or any other single character.
_TOKEN = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|\s+|\w+|.", re.DOTALL)
_OPENS = {"(": ")", "[": "]", "{": "}"}
_RULE = ("(", "buf", ".", "validate", ".")


def without_rules(text: str) -> str:
    """Returns the text of a .proto file without the rules, and without the import that they need."""
    tokens = _TOKEN.findall(text)
    kept: list[str] = []
    at = 0
    while at < len(tokens):
        if _opens_options(tokens, at):
            end = _closing(tokens, at)
            options = [option for option in _parts(tokens[at + 1 : end]) if not _is_rule(option)]
            if options:
                kept.append(f"[{', '.join(''.join(option).strip() for option in options)}]")
            elif kept[-1].isspace():
                kept.pop()
            at = end + 1
        elif _begins_statement(kept) and tokens[at] in ("import", "option") and _is_removed(tokens, at):
            # Also remove the white space after the statement: the end of its line, and the indentation of the next
            # line.
            at = _statement_end(tokens, at) + 1
            at += tokens[at].isspace()
        else:
            kept.append(tokens[at])
            at += 1
    return "".join(kept)


def _is_code(token: str) -> bool:
    return not token.isspace() and not token.startswith(("//", "/*"))


def _code(tokens: list[str]) -> tuple[str, ...]:
    return tuple(filter(_is_code, tokens))


def _is_rule(option: list[str]) -> bool:
    return _code(option)[: len(_RULE)] == _RULE


def _opens_options(tokens: list[str], at: int) -> bool:
    """Returns whether the options of a field begin here: a `[` after the field's number. (An option's value may contain
    lists too, but no list comes after a number.)"""
    if tokens[at] != "[":
        return False
    before = next(token for token in reversed(tokens[:at]) if _is_code(token))
    return before[0].isdigit()


def _begins_statement(kept: list[str]) -> bool:
    return next((token for token in reversed(kept) if _is_code(token)), ";") in (";", "{", "}")


def _is_removed(tokens: list[str], at: int) -> bool:
    word, *rest = _code(tokens[at : _statement_end(tokens, at)])
    return _is_rule(rest) if word == "option" else rest[-1][1:-1] == RULES


def _closing(tokens: list[str], at: int) -> int:
    """Returns the position at which the bracket at `at` is closed."""
    wanted: list[str] = []
    for place in range(at, len(tokens)):
        token = tokens[place]
        if token in _OPENS:
            wanted.append(_OPENS[token])
        elif wanted and token == wanted[-1]:
            wanted.pop()
            if not wanted:
                return place
    raise ValueError(f"a {tokens[at]!r} is never closed")


def _statement_end(tokens: list[str], at: int) -> int:
    """Returns the position of the semicolon that ends the statement at `at`."""
    while tokens[at] != ";":
        at = (_closing(tokens, at) if tokens[at] in _OPENS else at) + 1
    return at


def _parts(tokens: list[str]) -> Iterator[list[str]]:
    """Splits a list at its commas, except for those within brackets."""
    begin = at = 0
    while at < len(tokens):
        if tokens[at] == ",":
            yield tokens[begin:at]
            begin = at + 1
        at = (_closing(tokens, at) if tokens[at] in _OPENS else at) + 1
    yield tokens[begin:]


def write(target: Path) -> list[Path]:
    """Writes the copies into the folder `target`. Each copy has the relative path of its original. Returns these
    paths."""
    written: list[Path] = []
    for pattern in (OURS, *AS_THEY_ARE):
        for source in sorted(PROTO.glob(pattern)):
            path = source.relative_to(PROTO)
            copy = target / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            if pattern == OURS:
                copy.write_text(without_rules(source.read_text("utf-8")), "utf-8")
            else:
                shutil.copyfile(source, copy)
            written.append(path)
    return written


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("usage: ./run gen --plain DIR", file=sys.stderr)
        return 2
    target = Path(sys.argv[1])
    if target.resolve() == PROTO:
        print("proto/ keeps its rules: give another folder", file=sys.stderr)
        return 2
    for path in write(target):
        print(target / path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
