"""A rich console that shows control characters in text instead of executing them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment

from labkit.common.text import visible


class Console(rich.console.Console):
    """A console without markup, on which only rich's own control sequences (cursor, colours) reach the terminal."""

    def __init__(self, **settings: Any):
        super().__init__(**({"highlight": False, "markup": False, "emoji": False} | settings))

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """The segments of a renderable, with control characters made visible."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)
