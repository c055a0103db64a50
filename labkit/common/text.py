"""Escaping of untrusted text for display: names of folders, errors, output of scripts, names of hosts and devices.

Characters that control a terminal or change how a text is displayed become visible escapes such as `\\x1b` or
`\\u202e`: control characters (C0, DEL and C1), line and paragraph separators, zero-width and invisible characters,
characters that override the writing direction, and unpaired surrogates. Standard library only, because errors are
displayed before the environment is set up.
"""

from __future__ import annotations

import html
import re

_HIDDEN = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\xad"  # controls except tab and newline; soft hyphen
    r"\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # zero-width, direction, annotations
    r"\ud800-\udfff\U000e0000-\U000e007f"  # surrogates; tags
)
_IN_TEXT = re.compile(f"[{_HIDDEN}]")
_IN_LINE = re.compile(f"[\t\n{_HIDDEN}]")
_COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_SHORT = {"\t": r"\t", "\n": r"\n", "\r": r"\r"}


def visible(text: str) -> str:
    """A text with visible escapes; newlines and tabs are kept."""
    return _IN_TEXT.sub(_escape, text)


def visible_line(text: str) -> str:
    """A text as one line with visible escapes, including newlines and tabs."""
    return _IN_LINE.sub(_escape, text)


def visible_log(text: str) -> str:
    """Output of a program as in `visible`, without sequences that set colours or move the cursor (CSI). Of a line that
    was overwritten with carriage returns, only the final text is kept.
    """
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in _COLOURS.sub("", text).split("\n"))
    return visible("\n".join(lines))


def escape(text: str, quote: bool = True) -> str:
    """A text as HTML, with visible escapes."""
    return html.escape(visible(text), quote)


def last_line(text: str) -> str:
    """The last line of a text that is not blank, such as the reason of an error; empty if there is none."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if match[0] in _SHORT:
        return _SHORT[match[0]]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
