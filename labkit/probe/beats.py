"""Notices a node that is cut off. TCP reports nothing when a cable is pulled: the other ranks would wait in their next
collective until its timeout, which is half an hour by default.

The first rank of each node writes a growing number to the store of the ranks, and reads those of the other nodes. If
one does not grow for `patience` seconds, this rank reports it and exits with an error, and torchrun restarts or ends
the run as for any other error of a rank.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from labkit.probe.journal import Journal
from labkit.probe.leaving import exit_process

_OVER = "over"
_LOOKS = 8  # within `patience`
_GOODBYE = 1.0  # seconds in which the store takes the last value


class Beats:
    """Observes the other nodes from `start` until this process ends. `nodes` has the node of each rank, `hosts` its
    host; `connect` opens a connection to the store with a timeout.

    Two threads, because a read of the store that is cut off returns after minutes.
    """

    def __init__(
        self,
        journal: Journal,
        connect: Callable[[timedelta], Any],
        nodes: Mapping[int, str],
        hosts: Mapping[str, str],
        patience: float,
        end: Callable[[int], Any] = exit_process,
    ):
        self._journal, self._patience, self._end = journal, patience, end
        self._own, self._nodes, self._hosts = os.environ.get("GROUP_RANK", "0"), dict(nodes), hosts
        # longer than until the report, so that an error before it means that the store is gone
        self._store = connect(timedelta(seconds=4 * patience))
        self._looks = {node: 0 for node in self._nodes.values() if node != self._own}  # since its number grew
        self._ended: set[str] = set()
        self._over = threading.Event()
        self._talks = threading.Thread(target=self._talk, name="labkit beats", daemon=True)

    def start(self) -> None:
        """Starts both threads."""
        atexit.register(self._say_goodbye)
        self._talks.start()
        threading.Thread(target=self._watch, name="labkit nodes", daemon=True).start()

    def _say_goodbye(self) -> None:
        self._over.set()
        self._talks.join(_GOODBYE)

    def _talk(self) -> None:
        """Writes and reads until this rank ends, or the store does, with rank 0: gloo and NCCL notice that."""
        beat, known = 0, {}
        try:
            while not self._over.wait(self._patience / _LOOKS):
                beat += 1
                self._store.set(f"labkit/beat/{self._own}", str(beat))
                for node in self._looks.keys() - self._ended:
                    said = self._store.get(f"labkit/beat/{node}").decode()
                    if said == _OVER:
                        self._ended.add(node)
                    elif said != known.get(node):
                        known[node], self._looks[node] = said, 0
            self._store.set(f"labkit/beat/{self._own}", _OVER)
        except RuntimeError:  # what torch raises for a store that is gone
            self._over.set()

    def _watch(self) -> None:
        """Counts looks, not time, so that a process that was stopped does not blame the others when it continues."""
        while not self._over.wait(self._patience / _LOOKS):
            for node in self._looks:
                self._looks[node] += 1
            silent = {node for node, looks in self._looks.items() if looks > _LOOKS} - self._ended
            if silent:
                self._report(silent)
                return

    def _report(self, silent: set[str]) -> None:
        ranks = {str(rank): self._hosts[str(rank)] for rank, node in self._nodes.items() if node in silent}
        self._journal.write("cut_off", hosts=ranks, seconds=self._patience)
        names = " and ".join(dict.fromkeys(ranks.values()))
        said = f"{names} has not answered for {self._patience:g} s"
        self._journal.write("error", type="NodeLost", message=said, traceback="", ops=[], owners={})
        self._end(1)
