"""The program that runs a loader: `run_loader(__file__, "Loader", folder)` in the first line of a graded script
executes the rest of it, the answer, in the ranks of three runs, one after another.

The ranks are plain processes: a loader needs no collectives. The first run makes an epoch and is interrupted in the
next one; the second resumes on another number of ranks, and is interrupted in the same epoch; the third ends it and
makes another one. What a resumed run gets is the JSON that `state()` returned on each rank, and nothing else. Ranks and
workers report through a pipe which shards they open, how much memory they have then, and which samples were delivered.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.heap
import os
import secrets
import selectors
import sys
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import psutil
import torch

from labkit.course.build.ranks.entry import code_of, raised_line
from labkit.course.build.ranks.rules import BY_ANSWER, is_caused
from labkit.course.build.trials.loader_task import OBSERVED, STATE, TASK, digests
from labkit.probe.__main__ import use_temporary_folder

_PATIENCE = 30.0  # seconds without a message of any rank
_PAUSE = 0.01  # seconds between two looks at workers
_QUIET = 5  # looks at which no worker runs: they have prefetched all they will
_MOST = 200  # looks; workers that are still running then do something else
_MANY = 100  # samples of a batch, whose names still fit into a line
_LINE = 4000  # bytes: with a key, a pipe takes this from one of several writers without mixing it with others

_FORBIDDEN = {event: words for event, words in BY_ANSWER.items() if event.startswith(("sys.", "gc."))}
_OUTLASTS = (  # events with which something could pass from one run to the next
    "os.symlink", "os.link", "os.mkdir", "os.rename", "os.utime", "os.truncate", "os.chmod", "os.setxattr",
    "mmap.__new__", "socket.bind", "socket.connect", "socket.sendto", "sqlite3.connect", "subprocess.Popen",
    "os.system", "os.exec", "os.posix_spawn", "ctypes.dlopen", "ctypes.dlsym",
)  # fmt: skip
_FORBIDDEN |= dict.fromkeys(_OUTLASTS, "leaves something outside of the run, which gets the state alone")

Said = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """What a run does: the number of whole epochs, or rests of one, and after how many steps of the next one it is
    interrupted; 0 if it is not."""

    ranks: int
    epochs: int
    steps: int


def run_loader(source: str, answer: str, folder: str) -> None:
    """Makes the runs of `TASK` with the class `answer` of the script `source`, until one fails; writes what was
    observed."""
    task = json.loads((Path(folder) / TASK).read_text(encoding="utf-8"))
    use_temporary_folder(folder)  # workers are killed, and leave their sockets
    multiprocessing.set_start_method("fork", force=True)  # a hook follows a fork, and the class needs no pickling
    runs: list[list[list[Said]]] = []
    states: list[Any] = []
    for part in task["parts"]:
        said = _run(source, answer, task, Part(**part), states)
        runs.append(said)
        states = [line["state"] for lines in said for line in lines if "state" in line]
        if len(states) < len(said):
            break
    (Path(folder) / OBSERVED).write_text(json.dumps(runs), encoding="utf-8")


def _run(source: str, answer: str, task: Mapping[str, Any], part: Part, states: Sequence[Any]) -> list[list[Said]]:
    """The messages of each rank of one run, in order. All processes have ended when it returns."""
    ranks: dict[int, int] = {}  # by the end of its pipe, the process of a rank
    key = secrets.token_hex(16).encode()
    for rank in range(part.ranks):
        reads, writes = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            for other in (reads, *ranks):
                os.close(other)
            _be_rank(source, answer, task, part, rank, states, _Pipe(writes, key))
        os.close(writes)
        ranks[reads] = pid
    text = _read(ranks)
    for pid in ranks.values():
        os.waitpid(pid, 0)
    return [[_message(line, key) for line in text[reads].splitlines()] for reads in ranks]


def _read(ranks: Mapping[int, int]) -> dict[int, bytes]:
    """What comes through each pipe until all its writers have ended. Ranks that say nothing for long are killed."""
    text = dict.fromkeys(ranks, b"")
    with selectors.DefaultSelector() as selector:
        for reads in ranks:
            selector.register(reads, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(_PATIENCE)
            if not ready:
                for pid in ranks.values():
                    _kill(pid)
            for key, _ in ready:
                content = os.read(key.fd, 1 << 16)
                text[key.fd] += content
                if not content:
                    selector.unregister(key.fd)
                    os.close(key.fd)
    return text


def _kill(pid: int) -> None:
    """Kills a rank and its workers."""
    try:
        process = psutil.Process(pid)
        workers = process.children(recursive=True)
    except psutil.NoSuchProcess:
        return
    for member in (*workers, process):
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue


# ---- in the ranks and their workers


class _Pipe:
    """Where a rank and its workers report: each message is one line, written at once, that begins with a `key`, which
    others who write to the pipe do not know."""

    def __init__(self, writes: int, key: bytes):
        self._writes, self._write, self._key = writes, os.write, key

    def say(self, **message: Any) -> None:
        """Writes a message."""
        line = json.dumps(message).encode()
        line = line if len(line) <= _LINE else b'{"error": "a message is too long"}'
        self._write(self._writes, self._key + line + b"\n")


def _message(line: bytes, key: bytes) -> Said:
    if not line.startswith(key):
        return {"forbidden": "writes to the pipe of the judge"}
    return dict(json.loads(line[len(key) :]))


class _Observer:
    """Reports each shard that a process opens, with the bytes that its objects have by then more than at its first one;
    and what an answer must not do."""

    def __init__(self, files: Sequence[str], names: dict[str, Any], pipe: _Pipe):
        self._files = {file: number for number, file in enumerate(files)}
        self._names, self._pipe, self._pid = names, pipe, os.getpid
        self._least: dict[int, int] = {}
        self._busy = False
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self._busy or (event != "open" and event not in _FORBIDDEN):
            return
        self._busy = True
        try:
            if event == "open":
                self._opened(*args)
            elif is_caused(sys._getframe(1), self._names) and not _shares(sys._getframe(1)):
                self._pipe.say(forbidden=f"{_FORBIDDEN[event]} ({event})")
        finally:
            self._busy = False

    def _opened(self, path: Any, mode: Any, flags: Any) -> None:
        name = path if isinstance(path, int) else os.fsdecode(path)
        if name in self._files:
            traced, pid = tracemalloc.get_traced_memory()[0], self._pid()
            least = self._least.setdefault(pid, traced)
            self._pipe.say(opens=self._files[name], pid=pid, bytes=traced - least)
        elif _writes(name, flags) and is_caused(sys._getframe(2), self._names) and not _shares(sys._getframe(2)):
            self._pipe.say(forbidden=f"writes {name}; what a resumed run gets is the state alone")


def _writes(name: int | str, flags: Any) -> bool:
    """Whether a file is opened for writing, and is none that importing a module writes."""
    if isinstance(name, int) or not isinstance(flags, int) or "__pycache__" in name or name == os.devnull:
        return False
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _shares(frame: FrameType | None) -> bool:
    """Whether multiprocessing opens a file, for the memory of a `Value` or an `Array`."""
    while frame is not None and frame.f_code.co_filename != multiprocessing.heap.__file__:
        frame = frame.f_back
    return frame is not None


def _be_rank(
    source: str, answer: str, task: Mapping[str, Any], part: Part, rank: int, states: Sequence[Any], pipe: _Pipe
) -> None:
    """The process of a rank, which does not return. It ends like one that is killed: with its workers."""
    try:
        torch.set_num_threads(1)
        namespace = ModuleType("answer")
        sys.modules[namespace.__name__] = namespace
        names = vars(namespace)
        tracemalloc.start()
        pipe.say(pid=os.getpid())
        _Observer(task["files"], names, pipe)
        try:
            exec(code_of(source), names)
            _train(names[answer], task, part, rank, states, pipe.say)
        except (Exception, SystemExit) as error:
            words = str(error).strip().splitlines() or [""]
            pipe.say(error=f"{type(error).__name__}: {words[-1]}{raised_line(error.__traceback__, source)}"[:1000])
        for worker in psutil.Process().children(recursive=True):
            worker.kill()
    finally:
        os._exit(0)


def _train(
    loader_class: Any, task: Mapping[str, Any], part: Part, rank: int, states: Sequence[Any], say: Callable[..., None]
) -> None:
    """Takes the batches of this rank, as a training would, and asks for the state where the run is interrupted."""
    loader = loader_class(dict(task["files"]), rank, part.ranks, task["workers"], task["batch"], task["seed"])
    if states:
        loader.load(json.loads(json.dumps(states)))
    for _ in range(part.epochs):
        say(epoch=True)
        for batch in loader:
            say(batch=digests(_array(batch)))
    if part.steps:
        say(epoch=True)
        batches = iter(loader)
        for _ in range(part.steps):
            batch = next(batches, None)
            if batch is None:
                break
            say(batch=digests(_array(batch)))
        _wait_for_workers()
    state = json.dumps(loader.state())
    say(bytes_of_state=len(state))
    say(state=json.loads(state) if len(state) <= STATE else None)


def _wait_for_workers() -> None:
    """Until the workers have prefetched what they will: none of them is running."""
    quiet = looks = 0
    while quiet < _QUIET and looks < _MOST:
        running = [
            worker for worker in psutil.Process().children(recursive=True) if _status(worker) == psutil.STATUS_RUNNING
        ]
        quiet, looks = 0 if running else quiet + 1, looks + 1
        time.sleep(_PAUSE)


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return ""


def _array(batch: Any) -> np.ndarray:
    """A batch, which may be an array, a tensor or a list: int64, (samples, numbers)."""
    array = np.asarray(batch)
    if array.ndim != 2 or array.dtype != np.int64:
        raise TypeError(f"a batch must be int64 of shape (samples, numbers), got {array.dtype} of shape {array.shape}")
    if len(array) > _MANY:
        raise ValueError(f"a batch has {len(array)} samples, which is far too many")
    return array
