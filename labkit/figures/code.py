"""Scripts and their differences as text that a notebook shows highlighted: what `write_script`, `diff_scripts` and
`excerpt` return to the labs."""

from __future__ import annotations

from typing import Any

from pygments.lexer import Lexer
from pygments.lexers import DiffLexer, PythonLexer
from pygments.token import Token

from labkit.common.text import escape, visible
from labkit.common.units import counted
from labkit.plan import script
from labkit.plan.spec import Spec

_LEXERS: dict[str, Lexer] = {"python": PythonLexer(), "diff": DiffLexer()}


def _ink(name: str, light: str, dark: str) -> str:
    """The colour of JupyterLab's editor, and elsewhere that of the page's colour scheme."""
    return f"color:var(--jp-mirror-editor-{name}-color,light-dark({light},{dark}))"


_STYLES = {
    Token.Keyword: _ink("keyword", "#8250df", "#c8a5ff") + ";font-weight:600",
    Token.Operator.Word: _ink("keyword", "#8250df", "#c8a5ff") + ";font-weight:600",
    Token.Literal.String: _ink("string", "#0a5c36", "#86d6a4"),
    Token.Comment: _ink("comment", "#57606a", "#9aa4ae") + ";font-style:italic",
    Token.Literal.Number: _ink("number", "#9a4a00", "#ffb97a"),
    Token.Name.Function: _ink("def", "#0550ae", "#8cc4ff"),
    Token.Name.Class: _ink("def", "#0550ae", "#8cc4ff"),
    Token.Name.Builtin: _ink("builtin", "#0f6674", "#6fd0de"),
    Token.Generic.Inserted: "background-color:rgba(0,158,115,0.2)",
    Token.Generic.Deleted: "background-color:rgba(213,94,0,0.2)",
    Token.Generic.Subheading: "opacity:0.7",
    Token.Generic.Heading: "opacity:0.7",
}


class Code(str):
    """A text in a language, python or diff. A notebook shows it highlighted; if it has a `summary`, folded below it."""

    language: str
    summary: str

    def __new__(cls, text: str, language: str, summary: str = "") -> Code:
        """The text itself is the string."""
        code = super().__new__(cls, text)
        code.language, code.summary = language, summary
        return code

    def _repr_html_(self) -> str:
        spans = "".join(
            f'<span style="{style}">{escape(text)}</span>' if style else escape(text)
            for kind, text in _LEXERS[self.language].get_tokens(visible(self))
            for style in [_style(kind)]
        )
        block = f'<pre tabindex="0" style="overflow-x:auto;font-size:12px;line-height:1.45">{spans}</pre>'
        return f"<details><summary>{escape(self.summary)}</summary>{block}</details>" if self.summary else block

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


def _style(kind: Any) -> str:
    """The style of the closest kind of token that has one; empty if none has."""
    while kind is not Token:
        if kind in _STYLES:
            return _STYLES[kind]
        kind = kind.parent
    return ""


def write_script(spec: Spec) -> Code:
    """The training script of a Spec, as a text; a notebook shows it highlighted and folded. It needs torch and does not
    import labkit. Raises `SpecError` if the number of ranks is not set, or if the Spec names a user's script."""
    text = script.write_script(spec)
    return Code(text, "python", f"train.py: {counted(len(text.splitlines()), 'line')}")


def diff_scripts(a: Spec, b: Spec) -> Code:
    """The unified diff of the scripts of two Specs, as a text; empty if the scripts are equal."""
    return Code(script.diff_scripts(a, b), "diff")


def excerpt(spec: Spec, *names: str) -> Code:
    """The source of functions, classes or constants of a Spec's script, in the order of `names`, as a text.

    Raises `SpecError` as `write_script` does, and `LookupError` for a name that the script does not define.
    """
    return Code(script.excerpt(spec, *names), "python")
