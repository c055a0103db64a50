"""Source code as HTML: highlighted by pygments, which escapes the text, in the colours of the page's theme."""

from __future__ import annotations

from dataclasses import replace

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import DiffLexer, PythonLexer

from labkit.plan.script import diff_scripts, write_script
from labkit.plan.spec import Spec
from labkit.training.strategies import STRATEGIES

_FORMAT = HtmlFormatter(classprefix="labkit-", cssclass="labkit-source")


def script_html(spec: Spec) -> str:
    """The generated script of a Spec as HTML."""
    return source_html(write_script(spec))


def source_html(source: str) -> str:
    """Any Python source as HTML."""
    return highlight(source, PythonLexer(), _FORMAT)


def diff_html(spec: Spec) -> str:
    """The diff between the single-device script and the script of a Spec."""
    own = {option.name for option in STRATEGIES["single"].all_options + spec.workload_row.options}
    options = {name: value for name, value in spec.options.items() if name in own}
    diff = diff_scripts(replace(spec, strategy="single", nproc=1, options=options), spec)
    if not diff:
        return '<p class="labkit-empty">No difference: this is the single-device script.</p>'
    return highlight(diff, DiffLexer(), _FORMAT)
