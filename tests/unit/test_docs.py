"""Links lead somewhere: relative paths and anchors exist, and so do the files that a page or a comment names."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


TOP = {folder.name for folder in ROOT.iterdir() if folder.is_dir() and not folder.name.startswith(".")}
PAGES = sorted(
    str(page.relative_to(ROOT))
    for found in (ROOT.glob("*.md"), *((ROOT / top).rglob("*.md") for top in TOP))
    for page in found
)
FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`]+`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
# A file of this repository that a page names: a path with a folder, and only characters that our paths have.
FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)`")
# A file of this repository that a comment or a docstring names. There the path is not between backquotes.
NAMED = re.compile(rf"(?<![\w./-])(?:{'|'.join(sorted(TOP))})/[\w./-]+\.(?:md|proto|py|sql|toml)\b")
# The reader of the docs creates the first file. A test creates the second file. The third file is in proto/, and
# generated code names it without this folder.
NOT_FILES = {"deploy/compose/secrets", "deploy/compose/new.toml", "router/keda/externalscaler.proto"}
# Old entries name files that existed when the entries were written.
HISTORY = {"CHANGELOG.md"}


def prose(page: str) -> str:
    return FENCE.sub("", (ROOT / page).read_text())


@cache
def anchors(page: str) -> frozenset[str]:
    """Returns the anchors that GitHub makes of the headings. A second heading with the same text gets -1."""
    found: list[str] = re.findall(r'<a id="([^"]+)">', prose(page))
    for heading in re.findall(r"^#{1,6} (.+)$", prose(page), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip()
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        count = len([one for one in found if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", one)])
        found.append(f"{slug}-{count}" if count and slug in found else slug)
    return frozenset(found)


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_somewhere(page: str) -> None:
    wrong: list[str] = []
    for link in LINK.findall(CODE.sub("", prose(page))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        known = target.is_relative_to(ROOT) and target.exists()
        if known and anchor and target.suffix == ".md":
            known = anchor in anchors(str(target.relative_to(ROOT)))
        if not known:
            wrong.append(link)
    assert not wrong


@pytest.mark.parametrize("page", [page for page in PAGES if page not in HISTORY])
def test_every_file_that_a_page_names_exists(page: str) -> None:
    named = {path for path in FILE.findall(prose(page)) if path.split("/")[0] in TOP}
    assert not sorted(path for path in named - NOT_FILES if not (ROOT / path).exists())


def test_every_file_that_a_comment_names_exists() -> None:
    sources = [
        source for top in TOP for suffix in ("py", "sql", "proto") for source in (ROOT / top).rglob(f"*.{suffix}")
    ]
    assert len(sources) > 500
    named = {(source.name, path) for source in sources for path in NAMED.findall(source.read_text())}
    assert not sorted((name, path) for name, path in named if path not in NOT_FILES and not (ROOT / path).exists())
