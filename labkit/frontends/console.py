"""The terminal as rich draws on it: whatever text is drawn, its control characters are shown, not obeyed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment

from labkit.common.text import visible


class Console(rich.console.Console):
    """A console that reads no markup, and on which only rich's own controls (cursor, colours) reach the terminal as such."""

    def __init__(self, **settings: Any):
        super().__init__(**({"highlight": False, "markup": False, "emoji": False} | settings))

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """The segments of a renderable, with visible escapes."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)
