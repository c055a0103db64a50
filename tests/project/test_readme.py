"""The pages of the repository: every file, link and command that a page names exists."""

from __future__ import annotations

import re

import pytest

from labkit.cli.commands import COMMANDS
from labkit.setup.environment import CLONE

PAGES = (
    "README.md",
    "labkit/README.md",
    "labkit/REFERENCE.md",
    "labkit/MEASUREMENTS.md",
    "labkit/training/strategies/README.md",
    "tests/README.md",
    "tests/cuda_stand_in/README.md",
)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    path = CLONE / page
    text = path.read_text(encoding="utf-8")
    for address in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = address.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), address
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), address


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page):
    text = (CLONE / page).read_text(encoding="utf-8")
    for name in re.findall(r"`((?:\w+/)+(?:\w+\.(?:py|md|json))?)`", text):
        if not name.startswith(("runs/", "events/", "path/", "site/")):  # of a run or of the reader
            assert (CLONE / name).exists() or (CLONE / "labkit" / name).exists(), name


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_a_page_names_exist(page):
    text = (CLONE / page).read_text(encoding="utf-8")
    named = re.findall(r"(?:`|-m )labkit ([a-z]+)", text)
    assert set(named) <= COMMANDS.keys()
    if page == "labkit/REFERENCE.md":
        assert set(COMMANDS) - set(re.findall(r"[a-z]+", text)) == set(), "every command stands in the reference"
