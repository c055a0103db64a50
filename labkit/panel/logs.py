"""The log view: every rank's output, new lines only, a bounded number of them in the page; searched in the whole files."""

from __future__ import annotations

import threading
from typing import Any

import anywidget

from labkit.figures import rank_colour
from labkit.launch.folder import STREAMS, RunFolder
from labkit.launch.logs import LogTail, search
from labkit.panel.charts import STATIC

_FRESH = 1000  # lines that a page is told when it begins
_AT_ONCE = 200  # lines of one redraw: more than that nobody reads, and the newest matter
_FOUND = 500  # matches of a search that are shown


class _Page(anywidget.AnyWidget):
    _esm = (STATIC / "logs.js").read_text(encoding="utf-8")


class Logs:
    """The output of one run's ranks. `widget` goes on screen; `draw` sends it what is new, from any thread."""

    def __init__(self) -> None:
        self.widget = _Page()
        self.widget.on_msg(self._heard)
        self._lock = threading.RLock()
        self._folder: RunFolder | None = None
        self._tails: dict[tuple[int, str], LogTail] = {}
        self._sent: dict[tuple[int, str], int] = {}
        self._wanted: dict[str, str] = {}
        self._ready = False

    def restart(self, folder: RunFolder, nproc: int) -> None:
        """Shows another run."""
        with self._lock:
            self._folder = folder
            self._tails = {(rank, stream): self._tail(folder, rank, stream) for rank in range(nproc) for stream in STREAMS}
            self._wanted = {}
            self._begin()

    @staticmethod
    def _tail(folder: RunFolder, rank: int, stream: str) -> LogTail:
        return LogTail(lambda: folder.log_of(rank, stream), keep=_FRESH)

    def draw(self, over: bool = False) -> None:
        """Reads on and sends the newest lines of what is shown; when `over`, the last line too, though it may have no end."""
        with self._lock:
            for tail in self._tails.values():
                tail.poll()
            if not self._ready or self._wanted.get("query"):
                return
            lines = [line for key in self._shown() for line in self._new(key, _AT_ONCE)]
            if over:
                lines += [[*key, tail.partial, None] for key, tail in self._tails.items() if key in self._shown() and tail.partial]
            if lines:
                self._send(lines, self._count())

    def _new(self, key: tuple[int, str], most: int) -> list[list[Any]]:
        tail = self._tails[key]
        wanted = self._sent[key]
        first, texts = tail.since(max(wanted, tail.count - max(1, most // len(self._shown()))))
        self._sent[key] = tail.count
        lines = [[*key, text, None] for text in texts]
        if first > wanted:
            passed = f"… {_lines(first - wanted)} of rank {key[0]} went by; all are in its file, and Search finds them"
            lines.insert(0, [None, "", passed, None])
        return lines

    def _begin(self) -> None:
        """Tells the page what it is to show from now on, from the beginning."""
        self._sent = dict.fromkeys(self._tails, 0)
        if not self._ready:
            return
        query = self._wanted.get("query", "")
        if query:
            lines, note = self._found(query)
        else:
            lines, note = [line for key in self._shown() for line in self._new(key, _FRESH)], self._count()
        ranks = sorted({rank for rank, _ in self._tails})
        self._send(lines, note, fresh=True, query=query, ranks=ranks, colours=[rank_colour(rank) for rank in ranks])

    def _found(self, query: str) -> tuple[list[list[Any]], str]:
        lines: list[list[Any]] = []
        for rank, stream in self._shown():
            path = self._folder.log_of(rank, stream) if self._folder else None
            if path:
                lines += [[rank, stream, text, number + 1] for number, text in search(path, query, _FOUND)]
        more = len(lines) > _FOUND
        return lines[:_FOUND], f"the first {_FOUND} lines found" if more else f"{_lines(len(lines))} found"

    def _shown(self) -> list[tuple[int, str]]:
        rank, stream = self._wanted.get("rank"), self._wanted.get("stream")
        return [key for key in self._tails if rank in (None, "", str(key[0])) and stream in (None, "", key[1])]

    def _count(self) -> str:
        return _lines(sum(self._tails[key].count for key in self._shown()))

    def _send(self, lines: list[list[Any]], note: str, **more: Any) -> None:
        self.widget.send({"kind": "lines", "lines": lines, "note": note} | more)

    def _heard(self, _, message, buffers) -> None:
        if message.get("kind") == "show":  # in a thread, since a search reads whole files
            threading.Thread(target=self._show, args=(message,), daemon=True).start()

    def _show(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._ready = True
            self._wanted = {name: str(message.get(name) or "") for name in ("rank", "stream", "query")}
            self._begin()


def _lines(number: int) -> str:
    return f"{number:,} line" + ("" if number == 1 else "s")
