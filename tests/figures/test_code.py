"""Scripts as texts that a notebook shows highlighted."""

from __future__ import annotations

import html
import re

from labkit import Spec, diff_scripts, excerpt, write_script
from labkit.figures.code import Code
from labkit.plan import script

DDP = Spec(strategy="ddp", nproc=2)


def text_of(code: Code) -> str:
    """The text of the HTML without its elements."""
    _, block = re.split(r"<pre[^>]*>", code._repr_html_())
    return html.unescape(re.sub(r"<[^>]*>", "", block))


def test_a_script_is_its_text_and_folded_in_a_notebook():
    assert write_script(DDP) == script.write_script(DDP)
    drawn = write_script(DDP)._repr_html_()
    assert drawn.startswith(f"<details><summary>train.py: {len(write_script(DDP).splitlines())} lines</summary>")
    assert text_of(write_script(DDP)).strip() == script.write_script(DDP).strip()


def test_a_diff_and_an_excerpt_are_open_and_highlighted():
    diff, part = diff_scripts(Spec(strategy="single"), DDP), excerpt(DDP, "parallelize")
    for code, other in ((diff, script.diff_scripts(Spec(strategy="single"), DDP)), (part, "")):
        assert "<details" not in code._repr_html_() and "<span style=" in code._repr_html_()
        assert text_of(code).strip() == (other or script.excerpt(DDP, "parallelize")).strip()
    assert re.search(r'<span style="background-color[^>]*>\+ +model = DistributedDataParallel', diff._repr_html_())


def test_a_text_is_escaped():
    code = Code('x = "</pre><script>alert(1)</script>"', "python", "<b>")
    assert "<script>" not in code._repr_html_() and "<b>" not in code._repr_html_()
    assert text_of(code).strip() == code
