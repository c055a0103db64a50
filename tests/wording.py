"""Words and phrases that the project's texts do not use, each with what to write instead: the helper of the tests of
wording."""

from __future__ import annotations

import re

# The pages of the repository that are written for people.
PAGES = (
    "README.md",
    "labkit/README.md",
    "labkit/REFERENCE.md",
    "labkit/MEASUREMENTS.md",
    "labkit/training/strategies/README.md",
)

_NO_NOUN = r"(?=$|[^\w\s]|\s(and|as|at|before|for|from|if|in|is|on|or|that|to|until|when|which|with)\b)"

# Patterns, matched as whole words in any case, and what to write instead.
RULES = {
    # terms
    r"wires?": "link, interconnect",
    r"pieces?(?! of (HTML|code|Python))": "chunk (of a collective), shard (of state), micro-batch (of a batch)",
    r"addends?": "partial sum",
    r"places of (a|the) sequence": "positions",
    r"perceptrons?": "MLP",
    r"dear(er|est)?": "expensive",
    r"open communication": "exposed communication",
    r"look(s|ed|ing)? (more )?closely": "profile",
    r"bytes that (go|are told|are sent for nothing)": "traffic, redundant bytes",
    r"ranks? (do|does|did) not meet": "collective mismatch, deadlock, hang",
    r"(fell|falls?) with it": "was terminated because rank … failed",
    r"(said )?by theory": "expected (analytical)",
    r"ways? out": "fix",
    r"the own": "the local",
    r"go(es)? wrong on purpose": "fault injection",
    r"shares? of (the )?(samples|data|data set|batch)": "shard of the data set",
    r"in all ranks together": "global",
    r"laid by": "stored, cached",
    r"go(es)? on from": "resume from",
    r"ends? (a|the) process": "terminate, kill",
    r"without an end": "infinite",
    r"DP, emulated": "emulated data parallel",
    r"on the stage": "presentation mode",
    r"(ms|µs|s|seconds?|MB|MiB|GB|GiB|bytes?|samples|steps) an? "
    r"(step|second|rank|parameter|sample|token|minute|node)": ("per"),
    # phrases
    r"anew": "again",
    r"other than": "different from, except",
    r"beside": "next to, compared with",
    r"in all(?=[,.;:)]|$)": "in total",
    r"as it stands": "unchanged",
    rf"of (one's|its|their|his|her) own{_NO_NOUN}": "separate, local, or leave it out",
    r"(?<!of )one's own": "your own",
    r"left open": "unspecified",
    r"if nothing is said": "(default: …)",
    r"told": "is given, receives, reports",
    r"meant": "deliberate, intended",
    r"gravest": "most severe",
    r"in one sentence": "leave it out",
    r"whoever": "anyone who",
    r"nobody watches": "headless, no one is watching",
    # personification
    r"keepsakes?": "summary",
    r"farewells?": "shutdown",
    r"last words?": "final message",
    r"strangers?": "unknown process, foreign process",
    r"deaf(ness)?": "unresponsive",
    r"moods?": "state",
    r"(?<!Hugging )faces?": "front end",
    r"that is no more": "that no longer exists",
    # names of the generated scripts
    r"SPEAKER": "IS_LOGGING_RANK",
}
_PATTERNS = {re.compile(rf"\b(?:{pattern})(?!\w)", re.IGNORECASE): instead for pattern, instead in RULES.items()}


def offences(text: str) -> list[tuple[int, str, str]]:
    """The words in a text that are not used here: position, words, and what to write instead, in order."""
    return sorted(
        (found.start(), found[0], instead) for pattern, instead in _PATTERNS.items() for found in pattern.finditer(text)
    )
