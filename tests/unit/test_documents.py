"""The documents: what they link to is there, and each decision has a number of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")


def links(document: Path) -> Iterator[str]:
    """What it links to within the repository."""
    for match in LINK.finditer(document.read_text()):
        target = match[1] or match[2]
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors(document: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(document: Path) -> None:
    for target in links(document):
        path, _, anchor = target.partition("#")
        found = (document.parent / path).resolve() if path else document
        assert found.exists(), target
        assert found.is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(found), target


def test_decisions_are_numbered_one_after_another() -> None:
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    titles = [decision.read_text().partition("\n")[0] for decision in decisions]
    numbers = [int(decision.name[:4]) for decision in decisions]
    assert numbers == list(range(1, len(decisions) + 1))
    assert [int(title.split()[1].rstrip(".")) for title in titles] == numbers
