"""The pages of the repository: every file, link and command that a page names exists, and every example is valid."""

from __future__ import annotations

import ast
import re
import shlex

import pytest
from bench import page as measurements
from bench.main import BENCHES

import labkit
from labkit.cli.commands import COMMANDS
from labkit.cli.parser import parse
from labkit.setup.environment import CLONE

REFERENCE = tuple(
    sorted(str(page.relative_to(CLONE).as_posix()) for page in (CLONE / "labkit" / "reference").glob("*.md"))
)
PAGES = (
    "README.md",
    "labkit/README.md",
    *REFERENCE,
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
        if not name.startswith(("runs/", "events/", "path/", "site/", "kaggle/")):  # of a run or of the reader
            assert (CLONE / name).exists() or (CLONE / "labkit" / name).exists(), name


def test_measurements_are_those_that_benchmarks_saved():
    names = [bench.__name__ for bench in BENCHES]
    assert {path.stem for path in measurements.RESULTS.iterdir()} <= set(names)
    written = measurements.PAGE.read_text(encoding="utf-8").partition(measurements.BEGIN)[2]
    assert written.partition(measurements.END)[0].strip() == measurements.section(names).strip()


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_a_page_names_exist(page):
    text = (CLONE / page).read_text(encoding="utf-8")
    assert set(re.findall(r"(?:`|-m )labkit ([a-z]+)", text)) <= COMMANDS.keys()


def test_every_command_has_an_example_in_the_reference():
    text = "\n".join((CLONE / page).read_text(encoding="utf-8") for page in REFERENCE)
    assert set(re.findall(r"(?:^|`|-m )labkit ([a-z]+)", text, re.MULTILINE)) == COMMANDS.keys()


def test_the_index_of_the_reference_leads_to_every_page():
    index = (CLONE / "labkit/reference/README.md").read_text(encoding="utf-8")
    linked = {f"labkit/reference/{name}" for name in re.findall(r"\]\(([\w-]+\.md)\)", index)}
    assert linked == set(REFERENCE) - {"labkit/reference/README.md"}


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in a language; those of commands and of output name none."""
    fenced = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [block for name, block in fenced.findall((CLONE / page).read_text(encoding="utf-8")) if name == language]


@pytest.mark.parametrize("page", REFERENCE)
def test_commands_of_the_reference_have_valid_arguments(page):
    lines = [line for block in blocks(page, "") for line in block.splitlines()]
    lines += re.findall(r"^\| `(labkit [^`…]*)`", (CLONE / page).read_text(encoding="utf-8"), re.MULTILINE)
    for line in lines:
        command = re.match(r"(?:python3 -m )?labkit ([a-z].*)", line)
        if command:
            parse(shlex.split(command[1].partition(" < ")[0], comments=True))  # exits if an argument is not valid


@pytest.mark.parametrize("page", REFERENCE)
def test_python_examples_of_the_reference_import_public_names(page):
    for example in blocks(page, "python"):
        for statement in ast.walk(ast.parse(example)):
            if isinstance(statement, ast.ImportFrom) and statement.module == "labkit":
                assert {name.name for name in statement.names} <= set(labkit.__all__)
