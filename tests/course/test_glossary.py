"""The glossary: its table, the command `labkit glossary`, and the definitions on a page of a handout."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_markdown_cell, new_notebook

from labkit.cli import parser as cli
from labkit.cli.commands import act
from labkit.course.glossary import TERMS, find, mentions
from labkit.frontends.handout.clean import Prose
from labkit.frontends.handout.page import STUDENT, Terms, page_of

NAMES = [term.name for term in TERMS]


def ask(*argv: str) -> int:
    """The exit code of `labkit glossary`."""
    try:
        return act(cli.parse(["glossary", *argv]))
    except SystemExit as refused:
        return refused.code


def terms_in(text: str) -> list[tuple[str, str]]:
    """Each mention in a text with the name of its term."""
    return [(text[start:end], term.name) for start, end, term in mentions(text)]


# ---- the table


@pytest.mark.parametrize("term", TERMS, ids=NAMES)
def test_each_term_has_a_definition_and_related_terms_that_exist(term):
    assert term.definition.endswith((".", ".)")) and len(term.definition) > 40
    assert term.related and set(term.related) <= set(NAMES) - {term.name}
    assert len(set(term.related)) == len(term.related)


def test_no_name_stands_for_two_terms():
    keys = [
        re.sub(r"[\s_-]+", " ", name).casefold() for term in TERMS for name in (term.name, *term.also, *term.ordinary)
    ]
    assert sorted(keys) == sorted(set(keys))
    assert all(find(name) is term for term in TERMS for name in (term.name, *term.also, *term.ordinary))


def test_the_terms_of_the_course_are_there():
    """From `rank` to `zero bubble`: every strategy's own term, and those that the labs introduce."""
    asked = (
        "rank, world size, collective, all-reduce, bucket, DP, DDP, ZeRO-1, ZeRO-2, ZeRO-3, FSDP, tensor parallel,"
        " pipeline parallel"
    )
    for name in f"{asked}, context parallel, expert parallel, bubble, 1F1B, GPipe, interleaved, zero bubble, MFU".split(
        ", "
    ):
        assert find(name) in TERMS


# ---- finding a term


@pytest.mark.parametrize("text", ["all-reduce", "All reduce", "ALL_REDUCE", "  all   reduce "])
def test_case_hyphens_and_spaces_do_not_matter(text):
    assert find(text).name == "all-reduce"


def test_an_unknown_term_names_the_nearest_ones():
    with pytest.raises(LookupError, match=r"'bubbel' is not in the glossary; nearest terms: bubble"):
        find("bubbel")
    with pytest.raises(LookupError, match=r"'0xyz' is not in the glossary; labkit glossary lists all terms"):
        find("0xyz")


def test_mentions_in_a_text():
    assert terms_in("Ranks all-reduce their buckets") == [
        ("Ranks", "rank"),
        ("all-reduce", "all-reduce"),
        ("buckets", "bucket"),
    ]
    assert terms_in("activation checkpointing of activations") == [
        ("activation checkpointing", "activation checkpointing"),
        ("activations", "activation"),
    ]
    assert terms_in("Data-parallel training with DataParallel, dp and DP") == [
        ("Data-parallel", "data parallel"),
        ("DataParallel", "DP"),
        ("DP", "DP"),
    ]
    assert terms_in("ZeRO-1, not ZeRO") == [("ZeRO-1", "ZeRO-1"), ("ZeRO", "ZeRO")]
    assert terms_in("a frankly unranked tree, its stage and its unit") == []  # words with other meanings are not marked


# ---- the command


def test_without_a_term_it_lists_all(capsys):
    assert ask() == 0
    assert capsys.readouterr().out.splitlines() == [term.title for term in TERMS]


@pytest.mark.parametrize("argv", [["reduce-scatter"], ["Reduce", "Scatter"]])
def test_with_a_term_it_gives_definition_and_related_terms(argv, capsys):
    assert ask(*argv) == 0
    text = " ".join(capsys.readouterr().out.split())
    term = find("reduce-scatter")
    assert text == f"reduce-scatter {term.definition} Related: {', '.join(term.related)}"


def test_json_is_one_object(capsys):
    assert ask("--json", "mfu") == 0
    assert json.loads(capsys.readouterr().out) == find("MFU").to_json()
    assert ask("--json") == 0
    assert [term["term"] for term in json.loads(capsys.readouterr().out)["terms"]] == NAMES


def test_an_unknown_term_is_refused_in_one_sentence(capsys):
    assert ask("bubbel\x1b[2J") == 2
    err = capsys.readouterr().err
    assert err.startswith("labkit: 'bubbel") and "nearest terms: bubble" in err
    assert err.count("\n") == 1 and "\x1b" not in err


# ---- handouts


def page(*cells: str, **settings) -> tuple[BeautifulSoup, list[str]]:
    """The page of a lab with these markdown cells, and the headings of its contents."""
    notebook = new_notebook(cells=[new_markdown_cell(text) for text in cells])
    made = page_of(notebook, Path("labs/99_test.py"), Path("none"), **settings)
    return BeautifulSoup(made.body, "html.parser"), [text for _, _, text in made.contents]


def test_the_first_mention_links_to_the_definition():
    soup, contents = page("# Ranks and buckets\n\nEach rank sends. A rank &lt;waits&gt;.", "The ranks wait.")
    (link,) = soup.select("a.term")
    assert (link.text, link["title"]) == ("rank", find("rank").definition)
    assert "Each rank sends. A rank <waits>." in soup.text and "&lt;waits&gt;" in str(soup)
    row = soup.find(id=link["href"].removeprefix("#"))
    assert [cell.text for cell in row.find_all("td")] == ["rank", find("rank").definition]
    assert contents == ["Ranks and buckets", "Terms"]


def test_the_table_has_the_terms_of_the_page_in_alphabetical_order():
    soup, _ = page("A straggler and MFU.", "A bucket, and MFU again.")
    assert [row.td.text for row in soup.select("tbody tr")] == ["bucket", "MFU", "straggler"]


@pytest.mark.parametrize(
    "text", ["`rank`", "    if rank == 0:", "[the rank](#x)", "$rank$", "### rank", "<!-- rank -->"]
)
def test_code_formulas_headings_and_links_are_left_alone(text):
    soup, contents = page(text)
    assert not soup.select("a.term") and "Terms" not in contents


def test_a_term_in_a_removed_answer_is_not_in_the_table():
    soup, _ = page("A bucket.\n\n<details class='answer'>\n\nA straggler.\n\n</details>", audience=STUDENT)
    assert [row.td.text for row in soup.select("tbody tr")] == ["bucket"]


def test_an_anchor_is_not_that_of_a_heading():
    prose = Prose()
    prose.take("<h2>term rank</h2>")
    terms = Terms(prose.address)
    assert 'href="#term-rank-2"' in terms.mark("<p>A rank.</p>") and 'id="term-rank-2"' in terms.table()
