"""The log view: sends new lines of every rank's output to the page, which keeps a bounded number; a search reads whole
files.
"""

from __future__ import annotations

import threading
from typing import Any

from labkit.common.text import visible_log
from labkit.figures import rank_colour
from labkit.frontends.panel.charts import HandshakeWidget, program
from labkit.record.folder import STREAMS, RunFolder
from labkit.record.logs import LogTail

_FRESH = 1000  # lines sent to a new page
_AT_ONCE = 200  # maximum lines per redraw; the newest are sent
_FOUND = 500  # maximum matches shown for a search
_NOTHING = {"rank": "", "stream": "", "query": ""}  # the default filter: all ranks, both streams, no search


class _Page(HandshakeWidget):
    _esm = program("logs.js")


class Logs:
    """The output of one run's ranks. Display `widget`; `draw` sends it the new lines, from any thread."""

    def __init__(self) -> None:
        self.page = _Page()
        self.page.on_msg(self._heard)
        self.widget = self.page.box
        self.widget.add_class("labkit-log-box")
        self._lock = threading.RLock()
        self._folder: RunFolder | None = None
        self._remark = ""
        self._tails: dict[tuple[int, str], LogTail] = {}
        self._sent: dict[tuple[int, str], int] = {}
        self._wanted = _NOTHING
        self._ready = False

    def restart(self, folder: RunFolder | None, nproc: int, remark: str = "") -> None:
        """Shows another run, or none; `remark` is shown next to the number of lines."""
        with self._lock:
            self._folder, self._remark = folder, remark
            keys = [(rank, stream) for rank in range(nproc) for stream in STREAMS] if folder else []
            self._tails = {key: self._tail(folder, *key) for key in keys}
            self._wanted = _NOTHING
            self._begin()

    @staticmethod
    def _tail(folder: RunFolder, rank: int, stream: str) -> LogTail:
        return folder.log_tail(rank, stream, keep=_FRESH)

    def draw(self, over: bool = False) -> None:
        """Reads new lines and sends the newest of those selected; if `over`, also a last line without a newline."""
        with self._lock:
            for tail in self._tails.values():
                tail.poll()
            if not self._ready or self._wanted["query"]:
                return
            lines = [line for key in self._shown() for line in self._new(key, _AT_ONCE)]
            if over:
                lines += [
                    [*key, visible_log(tail.partial), None]
                    for key, tail in self._tails.items()
                    if key in self._shown() and tail.partial
                ]
            if lines:
                self._send(lines, self._count())

    def _new(self, key: tuple[int, str], most: int) -> list[list[Any]]:
        tail = self._tails[key]
        wanted = self._sent[key]
        first, texts = tail.since(max(wanted, tail.count - max(1, most // len(self._shown()))))
        self._sent[key] = tail.count
        lines = [[*key, visible_log(text), None] for text in texts]
        if first > wanted:
            passed = f"… {_lines(first - wanted)} of rank {key[0]} not shown; Search reads the whole log file"
            lines.insert(0, [None, "", passed, None])
        return lines

    def _begin(self) -> None:
        """Sends the page the lines of the current selection, from the beginning."""
        self._sent = dict.fromkeys(self._tails, 0)
        if not self._ready:
            return
        for tail in self._tails.values():
            tail.poll()
        self._send_fresh([line for key in self._shown() for line in self._new(key, _FRESH)], self._count())

    def _send_fresh(self, lines: list[list[Any]], note: str) -> None:
        ranks = sorted({rank for rank, _ in self._tails})
        self._send(
            lines, note, fresh=True, wanted=self._wanted, ranks=ranks, colours=[rank_colour(rank) for rank in ranks]
        )

    def _found(self, folder: RunFolder, keys: list[tuple[int, str]], query: str) -> tuple[list[list[Any]], str]:
        lines: list[list[Any]] = []
        for rank, stream in keys:
            found = folder.search_log(rank, stream, query, _FOUND)
            lines += [[rank, stream, visible_log(text), number + 1] for number, text in found]
        more = len(lines) > _FOUND
        return lines[:_FOUND], f"first {_FOUND} matching lines" if more else f"{_lines(len(lines))} found"

    def _shown(self) -> list[tuple[int, str]]:
        rank, stream = self._wanted["rank"], self._wanted["stream"]
        return [key for key in self._tails if rank in ("", str(key[0])) and stream in ("", key[1])]

    def _count(self) -> str:
        count = _lines(sum(self._tails[key].count for key in self._shown()))
        return f"{count} · {self._remark}" if self._remark else count

    def _send(self, lines: list[list[Any]], note: str, **more: Any) -> None:
        self.page.send({"kind": "lines", "lines": lines, "note": note} | more)

    def _heard(self, _, message, buffers) -> None:
        if message.get("kind") in ("ready", "show"):  # in a thread, because a search reads whole files
            threading.Thread(target=self._show, args=(message,), daemon=True).start()

    def _show(self, message: dict[str, Any]) -> None:
        """A new view is "ready": its message selects nothing, and it receives what the view before it showed."""
        with self._lock:
            wanted = {name: str(message.get(name, before)) for name, before in self._wanted.items()}
            self._ready, self._wanted = True, wanted
            folder, keys = self._folder, self._shown()
            if folder is None or not wanted["query"]:
                self._begin()
                return
        found = self._found(folder, keys, wanted["query"])  # without the lock, so that `draw` can go on
        with self._lock:
            if self._wanted is wanted:
                self._send_fresh(*found)


def _lines(number: int) -> str:
    return f"{number:,} line" + ("" if number == 1 else "s")
