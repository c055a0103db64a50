"""Ranks that stay: their run, and the connection to each of them.

They are one run, whose script runs the cells that it is sent (`probe/cells.py`). So they have a run folder, a lease of
their devices and a supervisor like any run, and end with this process, however that ends.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection
from typing import Any, NamedTuple, TypeAlias

import comm

from labkit.frontends.magic.cell import INITIALISE, counted_ranks, ranks_text
from labkit.launch.watchdog import temporary
from labkit.plan.spec import Spec
from labkit.record.channel import receive, send, socket_name
from labkit.record.files import LogTail
from labkit.record.folder import STREAMS
from labkit.runs.handle import Run, begin

KEPT = 400  # newest lines of one stream that are shown
_GOODBYE = 5.0  # seconds in which the ranks leave when they are asked
_ANSWER = 60.0  # seconds in which a rank answers, however busy the machine is
_START = """\
# {nproc} ranks that stay: torchrun --standalone --nproc-per-node={nproc} train.py
import os
import time

import torch
import torch.distributed as dist

from labkit import report
from labkit.probe.cells import serve

{initialise}
rank, world_size = dist.get_rank(), dist.get_world_size()

# ---- the cells of the notebook, one after another, with these names
serve(globals())

# ---- shutdown
if dist.is_initialized():
    dist.destroy_process_group()
"""


class RanksGone(RuntimeError):
    """The ranks have ended, or do not answer; the message says why."""


class Message(NamedTuple):
    """What a rank has said, and the bytes of tensors that belong to it."""

    rank: int
    fields: dict[str, Any]
    data: list[bytes]


_Handler: TypeAlias = Callable[[Message], None]


class Group:
    """Ranks that stay, and the connection to each."""

    def __init__(self, spec: Spec):
        self.spec = spec
        self._connections: dict[int, Connection] = {}
        self._inbox: deque[Message] = deque()
        self._arrived = threading.Event()
        self._widgets = Widgets(self._tell_view)
        self._groups = 0  # process groups that were made again
        self.raised: set[int] = set()  # the ranks whose last cell raised an exception, which can be debugged
        source = _START.format(nproc=spec.nproc, initialise=INITIALISE[spec.device])
        self.run: Run = begin(spec, source=source)
        self.source = source
        self.tails: dict[tuple[int, str], LogTail] = {
            (rank, stream): self.run.folder.log_tail(rank, stream, keep=KEPT)
            for rank in range(spec.nproc)
            for stream in STREAMS
        }

    @property
    def ranks(self) -> range:
        return range(self.spec.nproc)

    @property
    def name(self) -> str:
        """`4 CPU ranks`."""
        return counted_ranks(self.spec.nproc, self.spec.device)

    def connect(self, draw: Callable[[str], None]) -> None:
        """Waits until all ranks are ready, and calls `draw` with the state. Raises `RanksGone`."""
        folder = temporary(self.run.folder.path)
        ready: set[int] = set()
        while len(ready) < self.spec.nproc:
            state = self.run.state
            if state.over:
                raise RanksGone(f"the ranks could not be started: {state.words}")
            draw(state.status.waiting or f"starting {self.name} that stay")
            for rank in self.ranks:
                if rank not in self._connections:
                    with suppress(OSError):  # it does not listen yet
                        self._connections[rank] = Client(str(folder / socket_name(rank)), "AF_UNIX")
                        threading.Thread(target=self._read, args=(rank,), daemon=True, name="labkit ranks").start()
            self.hear(0.1, ready=lambda message: ready.add(message.rank))

    def _read(self, rank: int) -> None:
        """The thread that receives what a rank says, until it is gone."""
        with self._connections[rank] as connection, suppress(EOFError, OSError):
            while True:
                message = Message(rank, *receive(connection))
                if message.fields["did"] == "comm":
                    self._widgets.hear(*message)
                    continue
                self._inbox.append(message)
                self._arrived.set()
        self._inbox.append(Message(rank, {"did": "gone"}, []))
        self._arrived.set()

    def _tell_view(self, rank: int, buffers: Sequence[bytes], **fields: Any) -> None:
        with suppress(OSError):  # the ranks have ended, and the next cell says so
            send(self._connections[rank], {"do": "comm", **fields}, buffers)

    def check(self) -> None:
        """Raises `RanksGone` if the ranks have ended since the last cell."""
        if self.run.state.over:
            raise RanksGone(self.fate)
        self.hear(0.0)

    @property
    def fate(self) -> str:
        """How the ranks have ended, waiting for that if they are about to."""
        self.run.wait(_ANSWER)
        state = self.run.state
        if not state.over:
            self.run.stop()
            return "the ranks did not answer and were stopped; their variables are lost"
        return f"the ranks have ended: {state.words}; their variables are lost"

    def tell(self, ranks: Iterable[int], do: str, data: Sequence[bytes] = (), **fields: Any) -> None:
        """Sends the same message to some ranks. Raises `RanksGone`."""
        for rank in ranks:
            try:
                send(self._connections[rank], {"do": do, **fields}, data)
            except OSError:
                raise RanksGone(self.fate) from None

    def hear(self, timeout: float, **handlers: _Handler) -> None:
        """Waits for messages for at most `timeout` seconds, and calls the handler of each kind (`did`); messages of
        other kinds stay. Each is removed when it has been handled, so that an interrupt loses none. Raises
        `RanksGone`."""
        self._arrived.wait(timeout)
        self._arrived.clear()
        for message in list(self._inbox):
            if message.fields["did"] == "gone":
                raise RanksGone(self.fate)
            if handler := handlers.get(message.fields["did"]):
                handler(message)
                self._inbox.remove(message)

    def forget(self) -> None:
        """Removes answers to questions of an earlier cell."""
        for message in list(self._inbox):
            if message.fields["did"] != "gone":
                self._inbox.remove(message)

    def ask(
        self, ranks: Iterable[int], do: str, answer: str, data: Sequence[bytes] = (), **fields: Any
    ) -> dict[int, Message]:
        """The answer of each of some ranks. Raises `RanksGone`."""
        wanted = set(ranks)
        answers: dict[int, Message] = {}

        def take(message: Message) -> None:
            answers[message.rank] = message

        self.tell(sorted(wanted), do, data, **fields)
        last = time.monotonic() + _ANSWER
        while silent := wanted - answers.keys():
            self.hear(0.1, **{answer: take})
            if time.monotonic() > last:
                self.run.stop()
                why = f"{ranks_text(silent)} did not answer for {_ANSWER:g} s, so the ranks were stopped"
                raise RanksGone(f"{why}; their variables are lost")
        return dict(sorted(answers.items()))

    def cut(self, ranks: Iterable[int]) -> None:
        """Ends the collectives in which these ranks wait."""
        ends = {rank: message.fields["ends"] for rank, message in self.ask(self.ranks, "ends", "ends").items()}
        for rank in ranks:
            self.tell([rank], "cut", peers=[end for other in self.ranks if other != rank for end in ends[other]])

    def regroup(self) -> str:
        """Makes the process group again; the reason if that fails."""
        self._groups += 1
        try:
            answers = self.ask(self.ranks, "regroup", "regrouped", number=self._groups)
        except RanksGone as gone:
            return str(gone)
        return next((message.fields["error"] for message in answers.values() if message.fields["error"]), "")

    def end(self) -> str:
        """Ends the ranks; returns the state of their run in words."""
        try:
            self.tell(self.ranks, "end")
            self.run.wait(_GOODBYE)
        except RanksGone:
            pass
        if not self.run.state.over:
            self.run.stop()
        return self.run.state.words


# ---- the notebook's end of widgets on ranks: between the model on a rank and its view in the browser


class Widgets:
    """The widgets of a group of ranks. `tell(rank, buffers, **message)` sends to a rank."""

    def __init__(self, tell: Callable[..., None]):
        self._tell = tell
        self._comms: dict[str, Any] = {}

    def hear(self, rank: int, message: dict[str, Any], buffers: Sequence[bytes]) -> None:
        """A message of the model of a widget on a rank, in any thread."""
        name = message["id"]
        content = {"data": message["content"], "metadata": message["metadata"], "buffers": [*buffers]}
        if message["kind"] == "comm_open":
            opened = comm.create_comm(comm_id=name, target_name=message["target_name"], **content)
            opened.on_msg(lambda said: self._pass_on(rank, name, said))
            self._comms[name] = opened
        elif (known := self._comms.get(name)) is not None and message["kind"] == "comm_msg":
            known.send(**content)
        elif known is not None:
            del self._comms[name]
            known.close(data=message["content"])

    def _pass_on(self, rank: int, name: str, said: dict[str, Any]) -> None:
        buffers = [bytes(buffer) for buffer in said.get("buffers") or ()]
        self._tell(rank, buffers, id=name, content=said["content"]["data"])
