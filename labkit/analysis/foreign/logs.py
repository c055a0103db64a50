"""Logs of a job: torchrun's `--log-dir`, the output of Slurm, Kubernetes, mpirun, Ray and pdsh, and plain text in which
the lines of ranks are interleaved. Who wrote a line follows from its prefixes or from the file, and what a rank failed
with from its traceback, from the lines of torch's C++ code, and from torchrun's summary."""

from __future__ import annotations

import calendar
import codecs
import math
import re
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from labkit.analysis.diagnose.finding import Finding, shorter
from labkit.analysis.diagnose.hang import MISMATCH
from labkit.analysis.diagnose.known_errors import KnownError, known_in
from labkit.analysis.foreign import ForeignError, Page, Table, kernel, nccl, present
from labkit.analysis.foreign.logged_steps import Logged, finite, first_not_finite, step_events, step_in, timed
from labkit.analysis.foreign.reading import Content, rank_in_name
from labkit.analysis.metrics import median
from labkit.common.files import open_regular
from labkit.common.units import counted, milliseconds, ranks_in_words
from labkit.record.events import OfRank
from labkit.record.ranks import PEER_GONE
from labkit.record.stacks import LIBRARIES, MESSAGE_LIMIT, TEXT_LIMIT, clipped, error_in, place

# ---- the lines of a file

_LONGEST = 1 << 14  # characters of a line
_MOST_SPEAKERS = 1 << 16
_MOST_ERRORS = 8  # of a speaker
_MOST_EVENTS = 4096  # lines of Slurm, Kubernetes, watchdogs and torchrun that are kept of a file
_MOST_LINES = 400  # of a traceback
_MOST_STEPS = 100_000  # of a speaker
_YEAR = 31_556_952  # seconds

_COLORS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_ISO = r"\d{4}-\d\d-\d\d[T _]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
_PREFIXES = re.compile(
    r"\s*(?:"
    rf"(?P<time>{_ISO}) (?:std(?:out|err) [FP] )?"  # kubectl logs --timestamps, and files of containerd
    r"|\[pod/(?P<pod>[\w.-]+)/[\w.-]+\] ?"  # kubectl logs --prefix
    r"|\((?P<actor>\w+ pid=\d+)(?:, ip=[\w.:]+)?\) ?"  # Ray
    r"|\[(?:rank(?P<rank>\d{1,7})\]: ?"  # torch, since 2.2
    r"|(?:[\w.@-]+@)?\d+,(?:mpirank:)?(?P<process>\d{1,7})(?:,[\w.-]+)?\]<std(?:out|err)>: ?)"  # mpirun --tag-output
    r"|\[[A-Za-z_]+(?P<local>\d{1,5})\]: ?"  # torchrun --tee: the role and the local rank
    r")"
)
_STAMP = re.compile(  # syslog, ts, and what else adds a time to what others print
    rf"\[?(?P<time>{_ISO}|\d{{4}}/\d\d/\d\d \d\d:\d\d:\d\d"
    r"|(?:[A-Z][a-z]{2} +\d{1,2} )?\d\d:\d\d:\d\d(?:[.,]\d+)?)\]?"
    r"(?: \S+ [\w.-]+(?:\[\d+\])?:)? (?=\[(?:rank|default)\d)"
)
_GLUED = re.compile(r"(?<=.)(?=\[rank\d{1,7}\]: )")  # two ranks wrote at the same time, in one line
_TASK = re.compile(r" *(\d{1,7}):(?!\d\d:\d\d) ?")  # srun --label, but no time
_HOST = re.compile(
    r"(?P<name>[\w.-]{1,100})(?:: | +\| )(?=Traceback \(most recent|\[rank\d{1,7}\]:)"
)  # pdsh, Docker Compose
_EXITED_BY_MPI = re.compile(r"\s*(?:Process name: \[\[.*\],(?P<rank>\d{1,7})\]|Exit code: +(?P<code>\d{1,3}))\s*$")
_BY_MPI = re.compile(r"process rank (?P<rank>\d{1,7}) with PID \d+ .*?exited on signal (?P<signal>\d{1,2})\b")
_NO_VALUE = re.compile(  # transformers tells no step, and 0 for a loss that has no value
    r"['\"]loss['\"]: ['\"]?(?P<loss>-?(?:nan|inf)\b|0\.0['\"]?, ['\"]grad_norm['\"]: ['\"]?nan\b)", re.IGNORECASE
)
_BARE = re.compile(r"(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): \S")
_USAGE = re.compile(r"(?:torchrun|accelerate|deepspeed|[\w.-]+\.py)(?: \w+)?: error: (?P<says>\S.*)")
_WORKER = re.compile(r"pid=(\d+)\) world_rank=(\d{1,7})")  # Ray, once for each worker
_TIME = re.compile(rf"(?P<iso>{_ISO})|\[?[EWIF](?P<day>\d{{3,4}}) (?P<clock>\d\d:\d\d:\d\d\.\d+)")
_ISO_PARTS = re.compile(r"([\d-]{10})[T _]([\d:]{8})(?:[.,](\d+))?(.*)")
_TRACEBACK = "Traceback (most recent call last):"
_OF_GROUP = re.compile(r"\s*\+-[-+]+(?: [\d.]+ -+)?\s*$|\s+[|+] ")  # the margin of an ExceptionGroup
_OF_RICH = re.compile(r"[│|] (?:(?P<file>\S.*?):(?P<line>\d+) in (?P<name>[\w<>.]+))?.*")
_CHAINED = re.compile(r"(?:During handling of the above exception|The above exception was the direct cause)")
_NO_MESSAGE = re.compile(
    r"\s*$|\[[\w/]|[EWIF]\d{3,4} |\d{4}-\d\d-\d\d|Traceback \(|\w+\.py:\d|={5}|-{5}|srun:|slurmstepd:"
)
_EXCEPTION = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$")
_LAUNCHERS = {
    "ChildFailedError",
    "SignalException",
    "CalledProcessError",
    "ProcessRaisedException",
}  # a launcher reports the end of a rank
_CRASH = re.compile(
    r"Fatal Python error: (?P<python>.+)|terminate called after throwing an instance of '(?P<thrown>[^']+)'"
    r"|Caught signal \d+ \((?P<ucx>[^:)]+)"
    r"|^(?P<shell>Segmentation fault|Bus error|Illegal instruction|Aborted)(?: \(core dumped\))?\s*$"
)
_SIGNALS = {
    "Killed": "SIGKILL",
    "Terminated": "SIGTERM",
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
}
_KILLED_BY_SHELL = re.compile(rf": line \d+: +\d+ ({'|'.join(_SIGNALS)})\b")
_CRASHES = ("Fatal Python", "terminate called", "Segmentation", "Bus error", "Illegal", "Aborted")
_WHAT = re.compile(r"\s+what\(\): +(?P<message>.+)")
_WHO = r"\[(?:PG (?:ID )?(?P<group>\d+)[^\]]*? )?Rank (?P<rank>\d+)\] +"
_WATCHDOG = re.compile(
    _WHO + r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<op>\w+).*?"
    r"Timeout\(ms\)=(?P<limit>\d+)"
)
_PROGRESS = re.compile(
    _WHO
    + r".*?(?:at (?:NCCL )?work(?: sequence id)?: (?P<at>\d+).*?)?[Ll]ast enqueued (?:NCCL )?work: (?P<called>-?\d+)"
    r", last completed (?:NCCL )?work: "
)
_DIED = re.compile(_WHO + r"(?:NCCL|Process group) watchdog thread terminated with exception: +(?P<says>.+)")
_STUCK = re.compile(_WHO + r".*(?:watchdog got stuck for (?P<seconds>\d+) seconds|Heartbeat monitor timed out)")
_FAILED_AT = re.compile(r"#\d{1,3} (?P<name>\S+) from (?P<file>\S+):(?P<line>\d+)\s*$")
_SENT = re.compile(
    r"Received (?:Signals\.)?(?P<name>SIG[A-Z]+|\d+) death signal|SignalException: .* got signal: (?P<number>\d+)"
)
_CHILD_ENDED = re.compile(  # DeepSpeed, Lightning
    r"'--local_rank=(?P<local>\d{1,5})'.*\] exits with return code = (?P<code>-?\d{1,4})"
    r"|\[rank: (?P<rank>\d{1,5})\] Child process with PID \d+ terminated with code (?P<ended>-?\d{1,4})"
)
_SPAWNED = re.compile(r"-- Process (?P<process>\d{1,5}) terminated with the following error:")
_SPAWN_ENDED = re.compile(
    r"process (?P<process>\d{1,5}) terminated with (?:signal (?P<signal>SIG\w+)|exit code (?P<code>\d+))"
)
_FROM_RAY = re.compile(r"[\w.]*RayTaskError(?:\(\w+\))?: .*ray::")  # the traceback of the task follows
_NO_FAILURE = ("Exception ignored in", "--- Logging error ---")  # before the traceback of an error that ends nothing
_DIGITS = re.compile(r"\d")
_FOLLOWING = ("SIGTERM", "KeyboardInterrupt", "ActorDiedError", "RayActorError", "RendezvousClosedError")
_REPEATED = re.compile(r" *\[repeated \d+x across cluster\].*")  # Ray
_ENOUGH_STEPS = 3  # of training after an error: the process has survived it
_AGENT_SAYS = re.compile(r"failed \(exitcode: (?P<code>-?\d{1,4})\) local_rank: (?P<local>\d{1,5}) \(pid: \d+\)")
_SUMMARY = re.compile(
    r"^\s*(?:(?P<root>Root Cause)|(?P<failures>Failures:)"
    r"|(?P<key>time|host|rank|exitcode|error_file|traceback)\s*: (?P<value>.*))"
)
_RANKS_OF = re.compile(r"(\d+) \(local_rank: (\d+)\)")

_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # as PowerShell redirects
_MESSAGES = ("message", "msg", "log", "event")  # keys of a line of JSON, with the text of the line
_TIMES = ("time", "timestamp", "ts", "@timestamp", "asctime")
_MORE = ("exception", "exc_info", "stack_trace")  # with a traceback

_SUFFIXES = (".log", ".out", ".err", ".txt", ".gz", ".jsonl")
_MOST_STRANGE = 0.05  # of the bytes with which a log begins may be no UTF-8
_NO_LOGS = (".py", ".ipynb", ".sh", ".md", ".rst")
_SURE = re.compile(rb"NCCL (?:INFO|WARN)|\[(?:rank|default)\d+\]:")
_MARKS = re.compile(
    rb"Traceback \(most|NCCL (?:INFO|WARN)|torch(?:run|\.distributed)|\[(?:rank|default)\d+\]:|srun: |slurmstepd: "
    rb"|\w(?:Error|Exception): |\b(?:rank|epoch|step|loss)\b",
    re.IGNORECASE,
)
_IN_SLURM = re.compile(r"(?:slurm[\w-]*|srun|sbatch): |oom[-_]kill")
_CANCELLED = re.compile(
    r"(?P<what>JOB|STEP) [\w.+]+ ON (?P<node>\S+) CANCELLED AT (?P<when>\S+)"
    r"(?: DUE (?:TO|to) (?P<why>[A-Z][A-Za-z ]*[A-Za-z]))?"
)
_TASK_ENDED = re.compile(r"srun: error: (?P<node>[^\s:]+): tasks? (?P<tasks>[\d,\-]+): (?P<how>.+)")
_KILLED_BY_SLURM = re.compile(r"[Dd]etected \d+ oom[-_]kill event|oom[-_]kill event")
_NODE_FAILED = re.compile(r"Node failure on (?P<node>[\w.,\[\]-]+)")
_POD_STOPPED = re.compile(
    r"\bEvicted\b|DeadlineExceeded|\bPreempt(?:ed|ing)\b|TaintManagerEviction|NodeNotReady|NodeLost|NodeShutdown"
)
_IN_KUBERNETES = re.compile(
    rf"OOMKilled|exit(?:ed with)? code 137|Exit Code: +137|low on resource: memory|{_POD_STOPPED.pattern}"
)


@dataclass
class Failure:
    """What one speaker failed with. `time` is in seconds since 1970, None if no line had one; `order` is the number of
    its first line in the file; `code` is the exit code as torchrun reports it, negative for a signal."""

    speaker: Speaker
    type: str
    message: str
    text: str = ""
    time: float | None = None
    order: int = 0
    code: int | None = None
    root: bool = False  # torchrun calls it the first

    @property
    def says(self) -> str:
        """`RuntimeError: mat1 and mat2 …`."""
        return f"{self.type}: {self.message}" if self.message else self.type

    @property
    def line(self) -> str:
        """`train.py:88 in step`; empty if there is no traceback, or only one of the launcher."""
        where = place(self.text)
        return "" if where.startswith(("torchrun:", "accelerate:", "deepspeed:")) else where

    @property
    def killed(self) -> bool:
        """Whether it got SIGKILL."""
        return self.code == -9 or self.type in ("SIGKILL", "Out Of Memory")

    @property
    def follows(self) -> bool:
        """Whether it may follow from the failure of another rank."""
        return self.code == -15 or self.type in _FOLLOWING or bool(PEER_GONE.search(self.says))


@dataclass(eq=False)
class Speaker:
    """Who wrote some lines of a file: a rank if that is known, otherwise a local rank, a task or a pod."""

    path: Path
    pod: str = ""
    task: int | None = None
    local: int | None = None
    rank: int | None = None
    labelled: bool = False  # by torch's `[rank3]: `, which only stderr has
    lines: int = 0
    last: str = ""
    ended: int = 0  # number of its last line
    when: str = ""  # the last time in its lines, as it stands there
    year: int = 2000  # of times that do not say theirs
    failures: list[Failure] = field(default_factory=list)
    open: list[str] = field(default_factory=list)  # lines of a traceback that has not ended
    whole: list[str] = field(default_factory=list)  # the tracebacks before it in its chain
    begun: int = 0  # number of the line at which it began
    lead: str = ""  # what a logger writes before each of its lines, with 0 for all digits
    message: Failure | None = None  # whose message may go on
    bare: Failure | None = None  # the last line that names an error, without a traceback
    no_value: tuple[int, str] | None = None  # the first line with a loss that has none, and that loss
    steps: dict[int, Logged] = field(default_factory=dict)  # of training
    thinned: bool = False  # whether some of them are left out
    lost: tuple[int | None, int] | None = None  # the first step with a loss that has no value, and the one before it
    since: int = 0  # steps of training after its last error
    told: dict[str, str] | None = None  # the failure of torchrun's list to which a traceback belongs
    ignored: bool = False  # whether the next traceback is of an error that ends nothing

    def add_step(self, step: int, logged: Logged) -> None:
        """A further step. Of too many, every second one so far is left out, but not those of `lost`."""
        if self.failures and step > max(self.steps, default=-1):
            self.since += 1
            if self.since >= _ENOUGH_STEPS:
                self.failures, self.message = [], None
        if self.lost is None and logged.loss is not None and not math.isfinite(logged.loss):
            self.lost = next(reversed(self.steps), None), step
        self.steps[step] = logged
        if len(self.steps) > _MOST_STEPS:
            kept = dict([*self.steps.items()][::2])
            lost = {known: self.steps[known] for known in self.lost or () if known in self.steps}
            self.steps, self.thinned = dict(sorted((kept | lost).items())), True

    @property
    def time(self) -> float | None:
        """Seconds since 1970 of the last time in its lines."""
        return _seconds(self.when, self.year)

    @property
    def only_errors(self) -> bool:
        """Whether all its lines are of stderr, so that a line after an error belongs to the error."""
        return self.path.stem == "stderr" or self.labelled

    @property
    def several(self) -> bool:
        """Whether it may be several ranks, which do not label their lines."""
        return self.rank is None and self.local is None and self.task is None

    @property
    def failure(self) -> Failure | None:
        """What it ended with: the last error of a rank that follows from no other; of several ranks, the first one."""
        own = [failure for failure in self.failures if not failure.follows] or self.failures[-1:]
        return None if not own else own[0] if self.several else own[-1]

    @property
    def name(self) -> str:
        """`rank 3`, `local rank 3 of node-1`, `task 2`, or the name of the file."""
        if self.rank is not None:
            return f"rank {self.rank}"
        if self.local is not None:
            return f"local rank {self.local}" + (f" of {self.pod}" if self.pod else "")
        if self.task is not None:
            return f"task {self.task}"
        return self.pod or shorter(self.path.name, 60)


@dataclass(frozen=True)
class Timeout:
    """A collective that reached its timeout on one rank: its number in its process group."""

    group: str
    op: str
    number: int
    seconds: float

    @property
    def of_all(self) -> bool:
        """Whether its group has all ranks, as far as it says; torch before 2.4 does not say the group."""
        return self.group in ("", "0")

    @property
    def words(self) -> str:
        """`ALLREDUCE #57`."""
        return f"{self.op} #{self.number}"


@dataclass
class Log:
    """What one file says."""

    path: Path
    speakers: list[Speaker]
    nccl: nccl.NcclLog
    summary: list[dict[str, str]] = field(default_factory=list)  # the failures that torchrun lists
    agent: list[tuple[int, int]] = field(default_factory=list)  # local rank and exit code
    timeouts: dict[int, Timeout] = field(default_factory=dict)  # by rank, the first
    called: dict[tuple[str, int], int] = field(default_factory=dict)  # by group and rank: the last collective
    failed_at: str = ""  # the line of the script that called the first collective that timed out
    stuck: dict[int, int] = field(default_factory=dict)  # by rank: seconds for which the watchdog was blocked
    sent: tuple[str, str] = ("", "")  # the signal that torchrun received, and the line that says so
    restarts: list[str] = field(default_factory=list)  # the error before each restart of torchrun
    slurm: list[str] = field(default_factory=list)
    kubernetes: list[str] = field(default_factory=list)
    kernel: list[str] = field(default_factory=list)
    lines: int = 0
    cut: str = ""


def looks_like_log(path: Path, head: bytes) -> bool:
    """Whether a file can be a log: it begins with text, and is no JSON, except torchrun's `error.json`."""
    if head.startswith(_UTF_16):
        return True
    if (
        path.suffix in _SUFFIXES[:4]
    ):  # a file system may leave a hole of zeros in it, a program bytes of other encodings
        head = head.replace(b"\0", b"")
        return head.decode("utf-8", "replace").count("\ufffd") <= _MOST_STRANGE * len(head)
    if b"\0" in head or (".json" in path.suffixes and path.name != "error.json"):
        return False
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.start > len(head) - 4 and len(head) > 4  # cut within a character
    return True


def is_of_job(path: Path, head: bytes) -> bool:
    """Whether a text in a folder is a log of a job, by its name, or by what it begins with."""
    if path.name in ("stdout.log", "stderr.log", "error.json"):
        return True
    if path.suffix not in _SUFFIXES:  # NCCL_DEBUG_FILE=/tmp/nccl.%h.%p
        return path.suffix not in _NO_LOGS and bool(_SURE.search(head))
    text = head.replace(b"\0", b"") if head.startswith(_UTF_16) else head
    return path.name.startswith("slurm") or bool(_MARKS.search(text))


def read_log(path: Path) -> Log:
    """Reads one file, line by line. Raises `OSError` as `open_regular`, and `ForeignError` if it is too large."""
    if path.name == "error.json":
        return _error_file(path)
    if path.suffix in _NO_LOGS[:3]:
        raise ForeignError(f"{shorter(str(path))} is a script; name what a job wrote, such as its logs")
    with open_regular(path) as file:
        content = Content(file, path)
        reader = _Reader(path, 1970 + int(path.stat().st_mtime / _YEAR))
        rest, decoder, first = b"", None, True
        while chunk := content.read():
            if first and chunk.startswith(_UTF_16):
                decoder = codecs.getincrementaldecoder("utf-16")("replace")
            chunk, first = decoder.decode(chunk).encode("utf-8", "replace") if decoder else chunk, False
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                reader.line(line)
            rest = rest[-_LONGEST:] if len(rest) > 1 << 20 else rest
        if rest:
            reader.line(rest)
        return reader.end(content.cut)


class _Reader:
    """The lines of one file, sorted by speaker."""

    def __init__(self, path: Path, year: int):
        self._year = year
        self._speakers: dict[tuple[Any, ...], Speaker] = {}
        self._log = Log(path, [], nccl.NcclLog())
        self._rank, self._local = _of_path(path)
        self._tasks: bool | None = None  # whether lines begin with the number of a task
        self._first: list[str] = []
        self._hosts: dict[str, str] = {}  # by the text with which their lines begin
        self._workers: dict[str, int] = {}  # of Ray: the rank of a process
        self._block: dict[str, dict[str, str] | None] = {}  # by pod: the failure that torchrun lists now
        self._root: dict[str, bool] = {}
        self._spawned: int | None = None  # the process of torch.multiprocessing.spawn whose error follows
        self._of_mpi: int | None = None  # the rank whose exit code follows

    def line(self, raw: bytes) -> None:
        """The next line."""
        text = raw[:_LONGEST].decode("utf-8", "replace").strip("\r\n")
        if "\x1b" in text:
            text = _COLORS.sub("", text)
        for line in _lines_in(text) if text.startswith('{"') or text.count("[rank") > 1 else (text,):
            if self._tasks is None:
                self._first.append(line)
                if len(self._first) >= 64:
                    self._decide()
            else:
                self._add(line)

    def _decide(self) -> None:
        """Whether srun has labelled the lines: nearly all of the first ones."""
        said = [line for line in self._first if line.strip() and not _IN_SLURM.match(line)]
        self._tasks = len(said) > 1 and sum(bool(_TASK.match(line)) for line in said) >= 0.9 * len(said)
        first, self._first = self._first, []
        for line in first:
            self._add(line)

    def end(self, cut: str) -> Log:
        """What the file says, after its last line."""
        if self._tasks is None:
            self._decide()
        for speaker in self._speakers.values():
            self._close(speaker)
        self._log.speakers = [*self._speakers.values()]
        self._log.cut = cut
        return self._log

    def _add(self, text: str) -> None:
        log = self._log
        log.lines += 1
        speaker, text, when = self._speaker(text)
        if speaker is None:
            return
        if speaker.open or speaker.message or _TRACEBACK[:-1] in text:
            text = _plain(text)
        if not when and (found := _TIME.match(text)):
            when = found[0]
        speaker.when = when or speaker.when
        if text.strip():
            speaker.lines += 1
            speaker.last, speaker.ended = text, log.lines
        self._add_traceback(speaker, text)
        if ("oss" in text or "ime" in text) and (trained := step_in(text)):
            step, loss, seconds = trained
            speaker.add_step(step, Logged(loss, seconds, speaker.time))
            return
        if "loss" in text and speaker.no_value is None and (lost := _NO_VALUE.search(text)):
            said = lost["loss"]
            speaker.no_value = log.lines, "0.0 with a grad_norm of nan" if said.startswith("0") else said
        if "NCCL" in text:
            log.nccl.add(text)
        if "atchdog" in text or "ast enqueued" in text or "eartbeat" in text:
            self._add_watchdog(speaker, text)
        elif text.startswith("#") and (frame := _FAILED_AT.match(text)):
            if not log.failed_at and not any(part in frame["file"] for part in LIBRARIES):
                log.failed_at = f"{frame['file'].rpartition('/')[2]}:{frame['line']}"
        elif "signal" in text and (sent := _SENT.search(text)):
            name = sent["name"] or sent["number"]
            if not log.sent[0]:
                log.sent = _signal(int(name)) if name.isdecimal() else name, shorter(text)
        elif "will restart worker group" in text:
            self._restart()
        elif ":" in text or "Cause" in text:
            self._add_summary(speaker, text)
        self._add_outside(text)

    def _add_outside(self, text: str) -> None:
        """A line of the kernel, of Slurm or of Kubernetes."""
        log = self._log
        if ("NVRM" in text or "oom" in text or "f memory: Kill" in text) and kernel.is_of_kernel(text):
            log.kernel += [shorter(text)] * (len(log.kernel) < _MOST_EVENTS)
        elif ("srun" in text or "slurm" in text or "oom" in text) and _IN_SLURM.search(text):
            log.slurm += [shorter(text)] * (len(log.slurm) < _MOST_EVENTS)
        elif ("xit " in text or "Reason" in text or "memory" in text or "od" in text) and _IN_KUBERNETES.search(text):
            log.kubernetes += [shorter(text)] * (len(log.kubernetes) < _MOST_EVENTS)

    def _speaker(self, text: str) -> tuple[Speaker | None, str, str]:
        """Who wrote a line, the line without its prefixes, and its time as it stands there."""
        pod, task, local, rank, labelled, when = "", None, self._local, self._rank, False, ""
        if self._tasks and (found := _TASK.match(text)):
            task, text = int(found[1]), text[found.end() :]
        if (found := _HOST.match(text)) and not found["name"].isdecimal():
            self._hosts[found[0]] = found["name"]
        elif found and task is None and len(found["name"]) < 8:
            self._tasks = True
            task, text = int(found["name"]), text[found.end() :]
        for label, host in self._hosts.items():
            if text.startswith(label):
                pod, text = host, text[len(label) :]
                break
        if (" [rank" in text or " [default" in text) and (stamp := _STAMP.match(text)):
            when, text = stamp["time"], text[stamp.end() :]
        while found := _PREFIXES.match(text):
            text = text[found.end() :]
            pod = found["pod"] or found["actor"] or pod
            number = found["rank"] or found["process"]
            rank = int(number) if number else rank
            labelled = labelled or bool(found["rank"])
            local = int(found["local"]) if found["local"] else local
            when = found["time"] or when
        if pod and "[repeated " in text:
            text = _REPEATED.sub("", text)
        if "\r" in text:  # a bar of progress, which is written over itself
            text = text.rpartition("\r")[2]
        for worker in _WORKER.finditer(text) if "world_rank" in text and len(self._workers) < _MOST_SPEAKERS else ():
            self._workers[worker[1]] = int(worker[2])
        if pod and rank is None and self._workers:
            rank = self._workers.get(pod.rpartition("=")[2])
        key = pod, task, local, rank, labelled
        speaker = self._speakers.get(key)
        if speaker is None and len(self._speakers) < _MOST_SPEAKERS:
            speaker = self._speakers[key] = Speaker(self._log.path, *key, year=self._year)
        return speaker, text, when

    # -- errors of a speaker

    def _add_traceback(self, speaker: Speaker, text: str) -> None:
        if speaker.lead and _DIGITS.sub("0", text[: len(speaker.lead)]) == speaker.lead:
            text = text[len(speaker.lead) :]
        if text.startswith((_TRACEBACK, "Exception in thread")) or (_TRACEBACK in text and not speaker.open):
            self._close(speaker)
            lead, begins, rest = text.partition(_TRACEBACK)
            speaker.lead = speaker.lead if text.startswith(_TRACEBACK) else _DIGITS.sub("0", lead) if begins else ""
            speaker.begun = self._log.lines
            speaker.open = [begins + rest or text]
        elif speaker.open:
            self._go_on(speaker, text)
        elif text.startswith(_NO_FAILURE):
            speaker.ignored, speaker.message = True, None
        elif (text.startswith(_CRASHES) or "Caught signal" in text) and (crash := _CRASH.search(text)):
            kind = next(filter(None, crash.groups()))
            self._failed(speaker, Failure(speaker, kind, "", text, speaker.time, self._log.lines))
        elif self._add_launcher(speaker, text):
            pass
        elif speaker.message is not None:
            self._add_message(speaker, speaker.message, text)
        elif ": error: " in text and (usage := _USAGE.match(text)):
            speaker.bare = Failure(speaker, "usage error", usage["says"], "", speaker.time, self._log.lines)
        elif _BARE.match(text):
            kind, says = error_in(text) or ("", "")
            speaker.bare = Failure(speaker, kind, says, "", speaker.time, self._log.lines) if kind else None
        elif speaker.whole and text.strip():
            speaker.whole = []

    def _add_launcher(self, speaker: Speaker, text: str) -> bool:
        """Whether a line is what mpirun, a shell or torch.multiprocessing.spawn says of the end of a process."""
        if text.startswith("-- Process") and (spawned := _SPAWNED.match(text)):
            self._spawned = int(spawned["process"])
        elif (self._of_mpi is not None or "Process name: [[" in text) and (ended := _EXITED_BY_MPI.match(text)):
            if ended["rank"]:
                self._of_mpi = int(ended["rank"])
            elif self._of_mpi is not None:
                self._add_end(speaker, self._of_mpi, f"exit code {ended['code']}")
                self._of_mpi = None
        elif "exited on signal" in text and (killed := _BY_MPI.search(text)):
            self._add_end(speaker, int(killed["rank"]), _signal(int(killed["signal"])))
        elif ": line " in text and (killed := _KILLED_BY_SHELL.search(text)):
            self._failed(speaker, Failure(speaker, _SIGNALS[killed[1]], "", "", speaker.time, self._log.lines))
        else:
            return False
        return True

    def _add_end(self, speaker: Speaker, rank: int, kind: str) -> None:
        """How a rank ended, as mpirun says it."""
        said = Speaker(speaker.path, rank=rank)
        self._failed(said, Failure(said, kind, "", "", speaker.time, self._log.lines))
        self._speakers[("mpirun", rank)] = said

    def _add_message(self, speaker: Speaker, message: Failure, text: str) -> None:
        """A line after an error, which may belong to its message."""
        if (what := _WHAT.match(text)) and (died := _DIED.search(text)):
            speaker.failures = [failure for failure in speaker.failures if failure is not message]
            speaker.message = None
            self._add_death(speaker, died)
        elif what:
            message.message = what["message"][:MESSAGE_LIMIT]
        elif not _NO_MESSAGE.match(text) and not _CHAINED.match(text) and len(message.text) < 2 * TEXT_LIMIT:
            message.text += f"\n{text}"
            if speaker.only_errors and len(message.message) < MESSAGE_LIMIT:
                message.message += f"\n{text}"
        elif _CHAINED.match(text) or not text.strip():
            speaker.whole = [*speaker.whole, text][-_MOST_LINES:]
        else:
            speaker.message = None

    def _go_on(self, speaker: Speaker, text: str) -> None:
        """A line after the beginning of a traceback: a frame, or the exception, which ends it."""
        if text.startswith((" ", "\t", "> File", _TRACEBACK)) or not text.strip():
            if len(speaker.open) < _MOST_LINES:
                speaker.open.append(text)
            return
        if _FROM_RAY.match(text):
            return
        if speaker.told is not None:
            self._close(speaker)
            return
        traced = "\n".join([*speaker.whole, *speaker.open, text])
        speaker.open = []
        kind, message = _exception_in(text)
        if kind and speaker.ignored:
            speaker.ignored = False
        elif kind == "ProcessExitedException" and (ended := _SPAWN_ENDED.search(message)):
            said = self._of_spawn(int(ended["process"]))
            how = ended["signal"] or f"exit code {ended['code']}"
            self._failed(said, Failure(said, how, "", clipped(traced), speaker.time, speaker.begun))
        elif kind and kind not in _LAUNCHERS:
            chained = bool(speaker.whole) and bool(speaker.failures) and any(map(_CHAINED.match, speaker.whole))
            failure = Failure(speaker, kind, message, clipped(traced), speaker.time, speaker.begun)
            if chained:  # the exception that was raised while another one was handled takes its place
                handled = speaker.failures.pop()
                failure.order = handled.order
                if failure.follows and not handled.follows:
                    failure.type, failure.message, failure.text = handled.type, handled.message, handled.text
            if self._spawned is not None and speaker.several:
                failure.speaker = self._of_spawn(self._spawned)
                self._spawned = None
            self._failed(failure.speaker, failure)
            speaker.whole = traced.split("\n")[-_MOST_LINES:]

    def _of_spawn(self, local: int) -> Speaker:
        """A process of torch.multiprocessing.spawn."""
        return self._speakers.setdefault(("spawn", local), Speaker(self._log.path, local=local, year=self._year))

    def _restart(self) -> None:
        """torchrun starts all ranks again: what they failed with before does not end the job."""
        failures = [speaker.failure for speaker in self._speakers.values() if speaker.failure is not None]
        first = min(failures, key=_order, default=None)
        if len(self._log.restarts) < _MOST_EVENTS:
            self._log.restarts.append(f"{first.speaker.name}: {shorter(first.says, 120)}" if first else "")
        for speaker in self._speakers.values():
            self._close(speaker)
            speaker.failures, speaker.bare = [], None
        self._log.timeouts, self._log.called, self._log.stuck, self._log.agent = {}, {}, {}, []

    def _failed(self, speaker: Speaker, failure: Failure) -> None:
        speaker.message, speaker.since = failure, 0
        if len(speaker.failures) < _MOST_ERRORS:
            speaker.failures.append(failure)

    def _close(self, speaker: Speaker) -> None:
        """A traceback that has no last line: the process was killed while it wrote."""
        if speaker.told is not None:
            speaker.told["traceback"] = "\n".join(speaker.open).rstrip()[:TEXT_LIMIT]
        speaker.message, speaker.open, speaker.told = None, [], None

    # -- lines of NCCL's watchdog, and of torchrun

    def _add_watchdog(self, speaker: Speaker, text: str) -> None:
        log = self._log
        if (found := _WATCHDOG.search(text)) and len(log.timeouts) < _MOST_EVENTS:
            timeout = Timeout(found["group"] or "", found["op"], int(found["number"]), int(found["limit"]) / 1000)
            log.timeouts.setdefault(int(found["rank"]), timeout)
            if speaker.local is not None and speaker.rank is None:
                speaker.rank = int(found["rank"])
        if (found := _PROGRESS.search(text)) and len(log.called) < _MOST_EVENTS:
            rank, group = int(found["rank"]), found["group"] or ""
            log.called.setdefault((group, rank), int(found["called"]))
            known = log.timeouts.get(rank)
            if known is not None and not known.group and found["at"] == str(known.number):
                log.timeouts[rank] = replace(known, group=group)
        if found := _DIED.search(text):
            self._add_death(speaker, found)
        if (found := _STUCK.search(text)) and len(log.stuck) < _MOST_EVENTS:
            rank = int(found["rank"])
            log.stuck[rank] = max(log.stuck.get(rank, 0), int(found["seconds"] or 0))

    def _add_death(self, speaker: Speaker, died: re.Match[str]) -> None:
        """The error for which NCCL's watchdog ends its process."""
        rank = int(died["rank"])
        if len(self._speakers) < _MOST_SPEAKERS:
            said = self._speakers.setdefault(("watchdog", rank), Speaker(speaker.path, rank=rank, year=self._year))
            if not said.failures:
                kind, _, message = died["says"].strip().partition(": ")
                failure = Failure(said, kind, message[:MESSAGE_LIMIT], "", speaker.time, self._log.lines)
                said.failures.append(failure)

    def _add_summary(self, speaker: Speaker, text: str) -> None:
        """A line of the list of failures that torchrun writes at its end."""
        log, pod = self._log, speaker.pod
        said = _AGENT_SAYS.search(text) if "exitcode" in text else None
        if "return code" in text or "Child process" in text:
            said = _CHILD_ENDED.search(text)
        if said and len(log.agent) < _MOST_EVENTS:
            local, code = said["local"] or said["rank"], said["code"] or said["ended"]
            log.agent.append((int(local), int(code)))
            return
        found = _SUMMARY.match(text)
        if not found:
            return
        if found["failures"] or found["root"]:
            self._block[pod], self._root[pod] = None, bool(found["root"])
        elif pod in self._root:
            if found["key"] == "time":
                self._block[pod] = {"root": "yes" if self._root[pod] else ""}
            block = self._block.get(pod)
            if block is not None:
                block[found["key"]] = shorter(found["value"], 2000)
                if found["key"] == "traceback" and len(log.summary) < _MOST_EVENTS:
                    log.summary.append(block)
                    speaker.told = block if speaker.open else None  # of a function with torch's decorator `record`
                    self._block[pod] = None


def _exception_in(text: str) -> tuple[str, str]:
    """Type and message of the last line of a traceback; two empty texts for any other line."""
    found = _EXCEPTION.match(text)
    return error_in(text) or ((found["type"].rpartition(".")[2], found["message"] or "") if found else ("", ""))


def _lines_in(text: str) -> list[str]:
    """The lines that a line has, if it is JSON of a logger or Docker, or if two ranks wrote it."""
    if text.startswith('{"'):
        return _of_json(text)
    return _GLUED.split(text)


def _of_json(text: str) -> list[str]:
    """The lines of a message that a logger or Docker has written as JSON, with its time and rank as prefixes; the text
    itself if it is none."""
    try:
        said = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return [text]
    if not isinstance(said, dict) or not (parts := [said[key] for key in _MESSAGES if isinstance(said.get(key), str)]):
        return [text]
    when = next((said[key] for key in _TIMES if isinstance(said.get(key), str)), "")
    rank = next((said[key] for key in ("rank", "global_rank") if type(said.get(key)) is int and said[key] >= 0), None)
    prefix = (f"{when} " if _TIME.fullmatch(when) else "") + (f"[rank{rank}]: " if rank is not None else "")
    more = [said[key] for key in _MORE if isinstance(said.get(key), str)]
    return [prefix + line for part in (parts[0], *more) for line in part.splitlines()] or [prefix]


def _plain(text: str) -> str:
    """A line of a traceback as Python writes it: without the margin of an ExceptionGroup, without the box of rich."""
    if text.startswith(("╭", "+-")) and _TRACEBACK[:-1] in text:
        return _TRACEBACK
    if text.startswith(("╰", "└")):
        return ""
    if text.startswith("│") and (found := _OF_RICH.match(text)):
        return f'  File "{found["file"]}", line {found["line"]}, in {found["name"]}' if found["file"] else "    "
    text = _OF_GROUP.sub("", text, count=1)
    return _TRACEBACK if text.startswith(f"Exception Group {_TRACEBACK}") else text


def _of_path(path: Path) -> tuple[int | None, int | None]:
    """The rank and the local rank that the name of a file says: `rank_3.log`, or `attempt_0/3/stderr.log`."""
    named = rank_in_name(path)
    if named is not None:
        return named, None
    local = path.parent.name
    of_torchrun = path.stem in ("stdout", "stderr", "error") and local.isdecimal() and len(local) < 6
    return None, int(local) if of_torchrun else None


def _signal(number: int) -> str:
    return signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"


def _seconds(text: str, year: int) -> float | None:
    """Seconds since 1970 of the time with which a text begins, None if it has none; a time without a zone counts as
    UTC."""
    found = _TIME.match(text)
    if not found:
        return None
    if found["iso"]:
        day, clock, fraction, zone = _ISO_PARTS.match(found["iso"]).groups()  # type: ignore[union-attr]
        date = [int(part) for part in day.split("-")]
    else:
        month, clock, fraction, zone = found["day"], found["clock"][:8], found["clock"][9:], ""
        date = [year, int(month[:-2]), int(month[-2:])]
    hours, minutes, seconds = (int(part) for part in clock.split(":"))
    if not (date[0] >= 1970 and 1 <= date[1] <= 12):
        return None
    ahead = 0
    if zone and zone != "Z":
        ahead = (1 if zone[0] == "+" else -1) * (3600 * int(zone[1:3]) + 60 * int(zone[-2:]))
    return calendar.timegm((*date, hours, minutes, seconds)) - ahead + float(f"0.{fraction or 0}")


def _error_file(path: Path) -> Log:
    """The `error.json` that torchrun lets a rank write."""
    log = Log(path, [], nccl.NcclLog())
    rank, local = _of_path(path)
    with open_regular(path) as file:
        data = Content(file, path).read(1 << 20)
    try:
        said = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        said = None
    message = said.get("message") if isinstance(said, dict) else None
    extra: Any = {}
    if isinstance(message, dict):
        extra, message = message.get("extraInfo") or {}, message.get("message")
    if not isinstance(message, str):
        log.cut = "it is no error file of torchrun"
        return log
    speaker = Speaker(path, local=local, rank=rank)
    extra = extra if isinstance(extra, dict) else {}
    stack, when = str(extra.get("py_callstack", "")), str(extra.get("timestamp", ""))
    kind, text = error_in(message.strip().splitlines()[-1] if message.strip() else "") or ("error", message)
    seconds = float(when) if when.isdecimal() and len(when) < 12 else None
    speaker.failures.append(Failure(speaker, kind, text[:MESSAGE_LIMIT], clipped(stack), seconds))
    log.speakers.append(speaker)
    return log


# ---- the job


class Job:
    """All files of a job together."""

    def __init__(self, logs: Sequence[Log]):
        self.logs, self.earlier = _last_attempt(logs)
        self.nccl = nccl.NcclLog()
        for log in self.logs:
            self.nccl.join(log.nccl)
        self.timeouts = {rank: timeout for log in self.logs for rank, timeout in log.timeouts.items()}
        self.called = {key: number for log in self.logs for key, number in log.called.items()}
        self.slurm = [line for log in self.logs for line in log.slurm]
        self.kubernetes = [line for log in self.logs for line in log.kubernetes]
        self.kernel = [line for log in self.logs for line in log.kernel]
        self.stuck = {rank: seconds for log in self.logs for rank, seconds in log.stuck.items()}
        self.failed_at = next((log.failed_at for log in self.logs if log.failed_at), "")
        self.sent, self.sent_line = next((log.sent for log in self.logs if log.sent[0]), ("", ""))
        self.restarts = [said for log in self.logs for said in log.restarts]
        self._name_ranks()
        self.speakers = [speaker for log in self.logs for speaker in log.speakers]
        self.failures = self._failures()

    def _name_ranks(self) -> None:
        """Gives speakers that are known by their local rank, or by their task, their rank."""
        of_local: dict[int, set[int]] = {}
        for log in self.logs:
            for block in log.summary:
                if ranks := _RANKS_OF.match(block.get("rank", "")):
                    of_local.setdefault(int(ranks[2]), set()).add(int(ranks[1]))
            for speaker in log.speakers:
                if speaker.local is not None and speaker.rank is not None:
                    of_local.setdefault(speaker.local, set()).add(speaker.rank)
        folders = {
            log.path.parents[2] for log in self.logs if _of_path(log.path)[1] is not None and log.path.is_absolute()
        }
        pods = {speaker.pod for log in self.logs for speaker in log.speakers}
        alone = len(folders) <= 1 and len(pods) <= 1
        self._of_local, self._alone = of_local, alone
        self._by_task = not any(log.summary or log.agent for log in self.logs)
        for log in self.logs:
            for speaker in log.speakers:
                if speaker.rank is None and speaker.local is not None:
                    known = of_local.get(speaker.local, set())
                    if len(known) == 1 and alone:
                        speaker.rank = next(iter(known))
                    elif not known and alone:
                        speaker.rank = speaker.local
                elif speaker.rank is None and speaker.task is not None and self._by_task:
                    speaker.rank = speaker.task

    def _failures(self) -> list[Failure]:
        """One failure of each speaker, the one that explains the others first."""
        found: list[Failure] = []
        by_rank: dict[int, Failure] = {}
        for speaker in self.speakers:
            if failure := speaker.failure:
                known = by_rank.get(speaker.rank) if speaker.rank is not None else None
                if known is None:
                    found.append(failure)
                    if speaker.rank is not None:
                        by_rank[speaker.rank] = failure
                elif failure.text and not known.line:
                    known.type, known.message, known.text = failure.type, failure.message, failure.text
        for log in self.logs:
            for block in log.summary:
                self._add_block(log, block, found, by_rank)
            for local, code in log.agent if not log.summary else ():
                self._add_agent(log, local, code, found, by_rank)
        if self._by_task:
            self._add_tasks(found, by_rank)
        if not found:  # the last line of a rank names an error, without a traceback
            bare = [speaker.bare for speaker in self.speakers if speaker.bare is not None]
            found = [failure for failure in bare if failure.order == failure.speaker.ended]
        return sorted(found, key=_order)

    def _add_block(self, log: Log, block: Mapping[str, str], found: list[Failure], by_rank: dict[int, Failure]) -> None:
        ranks = _RANKS_OF.match(block.get("rank", ""))
        if not ranks:
            return
        rank, code = int(ranks[1]), re.match(r"-?\d{1,4}", block.get("exitcode", ""))
        if block.get("root"):
            self._adopt(log, rank, found, by_rank)
        if rank not in by_rank:
            said = block.get("traceback", "")
            said = "" if said.startswith("To enable traceback") else said
            ended = re.match(r"Signal \d+ \((SIG\w+)\)", said)
            kind, message = _exception_in(said.rpartition("\n")[2].strip()) if not ended else (ended[1], "")
            speaker = Speaker(log.path, local=int(ranks[2]), rank=rank)
            kind = kind or f"exit code {code[0] if code else '?'}"
            by_rank[rank] = Failure(speaker, kind, message, said if "\n" in said else "", None)
            found.append(by_rank[rank])
        failure = by_rank[rank]
        failure.code = int(code[0]) if code else None
        failure.root = failure.root or bool(block.get("root"))
        if failure.time is None:
            failure.time = _seconds(block.get("time", ""), 2000)

    def _add_agent(self, log: Log, local: int, code: int, found: list[Failure], by_rank: dict[int, Failure]) -> None:
        """A process whose end torchrun or DeepSpeed tells, without a list of failures."""
        known = self._of_local.get(local, {local})
        if len(known) > 1 or not self._alone:
            if not found:
                speaker = Speaker(log.path, local=local)
                found.append(Failure(speaker, _signal(-code) if code < 0 else f"exit code {code}", "", code=code))
            return
        rank = next(iter(known))
        self._adopt(log, rank, found, by_rank)
        if rank not in by_rank:
            speaker = Speaker(log.path, local=local, rank=rank)
            by_rank[rank] = Failure(speaker, _signal(-code) if code < 0 else f"exit code {code}", "")
            found.append(by_rank[rank])
        by_rank[rank].code = code

    @staticmethod
    def _adopt(log: Log, rank: int, found: Sequence[Failure], by_rank: dict[int, Failure]) -> None:
        """Gives the only error of a log that says no rank to the rank that its launcher says has failed."""
        unnamed = [failure for failure in found if failure.speaker.several and failure.speaker.path == log.path]
        if len(unnamed) == 1 and rank not in by_rank and not unnamed[0].follows and not unnamed[0].speaker.pod:
            by_rank[rank] = unnamed[0]
            unnamed[0].speaker = Speaker(log.path, rank=rank)

    def _add_tasks(self, found: list[Failure], by_rank: dict[int, Failure]) -> None:
        """Ranks of which only srun says how they ended, before Slurm ended the others."""
        ends = [number for number, line in enumerate(self.slurm) if _ends_job(_CANCELLED.search(line))]
        told = self.slurm[: ends[0]] if ends else self.slurm
        for order, ended in enumerate(filter(None, map(_TASK_ENDED.search, told)), start=1):
            code = re.search(r"exit code (\d{1,4})", ended["how"])
            kind = f"exit code {code[1]}" if code else _SIGNALS.get(ended["how"].strip(), shorter(ended["how"], 60))
            for rank in _numbers(ended["tasks"]):
                if rank not in by_rank:
                    speaker = Speaker(self.logs[0].path, rank=rank)
                    by_rank[rank] = Failure(speaker, kind, "", order=order)
                    found.append(by_rank[rank])

    @property
    def steps(self) -> dict[int, dict[int, Logged]]:
        """By rank the steps that it has told; a job whose lines do not say their rank has told them as rank 0."""
        steps: dict[int, dict[int, Logged]] = {}
        for speaker in self.speakers:
            rank = speaker.rank if speaker.rank is not None else 0 if not self.ranks else None
            if speaker.steps and rank is not None:
                steps.setdefault(rank, {}).update(speaker.steps)
        return dict(sorted(steps.items()))

    @property
    def ranks(self) -> list[int]:
        """The ranks that are known by number."""
        of_nccl = self.nccl.largest.hosts if self.nccl.largest else {}
        said = {speaker.rank for speaker in self.speakers if speaker.rank is not None}
        failed = {failure.speaker.rank for failure in self.failures if failure.speaker.rank is not None}
        return sorted({*said, *failed, *self.timeouts, *(rank for _, rank in self.called), *of_nccl})


def _numbers(text: str) -> list[int]:
    """The numbers of `0,2-3`, at most 1,024."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal() and len(part) < 16:
            numbers += range(int(first), min(int(last or first), int(first) + 1024) + 1)
    return numbers[:1024]


def _order(failure: Failure) -> tuple[bool, bool, float, int]:
    return failure.follows, not failure.root, failure.time if failure.time is not None else float("inf"), failure.order


def _last_attempt(logs: Sequence[Log]) -> tuple[list[Log], int]:
    """The logs without those of torchrun's earlier attempts, and the number of these attempts."""
    attempts = {
        log.path: re.fullmatch(r"attempt_(\d{1,6})", log.path.parents[1].name)
        for log in logs
        if len(log.path.parents) > 2
    }
    newest = Counter[Path]()
    for path, found in attempts.items():
        if found:
            newest[path.parents[2]] = max(newest[path.parents[2]], int(found[1]))
    kept = [
        log for log in logs if not (found := attempts.get(log.path)) or int(found[1]) == newest[log.path.parents[2]]
    ]
    return kept, max(newest.values(), default=0)


# ---- what happened


def explain(logs: Sequence[Log]) -> Page:
    """What the logs of one job say."""
    job = Job(logs)
    ranks = job.ranks
    title = f"{counted(len(logs), 'log')} of a job · {counted(sum(log.lines for log in logs), 'line')}"
    title += f" · {counted(len(ranks), 'rank')}" if ranks else ""
    title += " · Slurm" if job.slurm else ""
    tables = [_failure_table(job), _step_table(job), _rank_table(job), *nccl.tables(job.nccl)]
    return Page(
        title=title,
        findings=[*_findings(job)],
        tables=[table for table in tables if table.rows],
        notes=[*_notes(job)],
        figures=_figures(job),
        events=partial(_events, ranks, job.steps),
    )


def _events(ranks: Sequence[int], steps: Mapping[int, Mapping[int, Logged]]) -> Iterator[OfRank]:
    yield from present(sorted({*ranks, *steps}))
    for rank, of_rank in steps.items():
        yield from step_events(rank, of_rank)


_FROM_A_PEER = ("nccl_unreachable", "nccl_transfer_failed")  # also reported because the process of a peer has ended


def _is_own(failure: Failure) -> bool:
    """Whether a failure is neither one of NCCL nor a consequence of another one."""
    known = _known(failure)
    return not failure.follows and (known is None or known.name != "nccl")


def _findings(job: Job) -> Iterator[Finding]:
    of_nccl = [*nccl.findings(job.nccl)]
    left_out = _FROM_A_PEER if job.failures and _is_own(job.failures[0]) else ()
    wrong = [finding for finding in of_nccl if finding.kind == "wrong" and finding.name not in left_out]
    memory, hardware = [*_out_of_host_memory(job)], [*kernel.hardware(job.kernel)]
    explains = {finding.name for finding in wrong} - {"nccl_not_initialized"}
    told = explains | ({"killed"} if memory else set()) | ({"gpu_fault", "illegal_access"} if hardware else set())
    yield from (*memory, *hardware, *(finding for finding in wrong if finding.name in explains))
    yield from _failed(job, told)
    yield from _stopped(job, after_failure=any(not failure.follows for failure in job.failures))
    yield from _timeouts(job)
    yield from _blocked(job)
    yield from _not_finite(job)
    if not explains:
        yield from wrong if not any(not failure.follows for failure in job.failures) else ()
    yield from (finding for finding in of_nccl if finding.kind != "wrong")


_NAN = (
    "an overflow or a division by zero: the learning rate is too high, fp16 has no loss scaling, or data are bad",
    "go back to the checkpoint before; skip the batches of these steps, lower the learning rate or clip gradients;"
    " torch.autograd.set_detect_anomaly(True) names the operation",
)


def _not_finite(job: Job) -> Iterator[Finding]:
    """The first loss that has no value."""
    lost = {rank: found for rank, steps in job.steps.items() if (found := first_not_finite(steps))}
    if not lost:
        for speaker in job.speakers:
            if speaker.no_value is not None:
                line, said = speaker.no_value
                where = f"line {line:,} of {_file(speaker.path)}"
                yield Finding("nan_loss", "wrong", f"the loss is {said} in {where}", f"{where}: loss {said}", *_NAN)
                return
        return
    rank = min(lost, key=lambda number: lost[number][0])
    step, loss = lost[rank]
    steps = job.steps[rank]
    before = [known for known in sorted(steps) if known < step and steps[known].loss is not None]
    when = f"in step {step:,}"
    evidence = f"rank {rank}: loss {loss:g} {when}"
    if before:
        evidence += f", and {steps[before[-1]].loss:g} in step {before[-1]:,}"
        when = when if before[-1] == step - 1 else f"in a step between {before[-1] + 1:,} and {step:,}"
    yield Finding(
        "nan_loss",
        "wrong",
        f"the loss becomes {loss:g} {when}" if before else f"the loss is {loss:g} from the first line on",
        evidence,
        *_NAN,
        (rank,),
    )


def _alike(failure: Failure) -> tuple[str, str]:
    return failure.type, re.sub(r"0x[0-9a-f]+|\d+", "#", failure.message)[:200]


def _failed(job: Job, explains: Set[str]) -> Iterator[Finding]:
    """The rank that failed first, and what with, unless a finding that `explains` says it."""
    if not job.failures:
        return
    first = job.failures[0]
    if first.follows and (job.timeouts or job.sent or _cancelled(job)):
        return
    known = _known(first)
    if known is not None and (known.name in explains or (known.name == "nccl" and explains)):
        return
    if known is None and first.killed and "killed" in explains:
        return
    same = [failure for failure in job.failures if _alike(failure) == _alike(first)]
    others = [failure for failure in job.failures if failure not in same]
    ordered = all(failure.follows or _is_before(first, failure) for failure in others)
    ranks = [failure.speaker.rank for failure in same if failure.speaker.rank is not None]
    who = ranks_in_words(sorted(ranks)[:_SHOWN], len(job.ranks)) if len(ranks) == len(same) else first.speaker.name
    where = f" ({first.line})" if first.line else ""
    says = shorter(_line_of(known, first) if known else first.says)
    rest = f"; {counted(len(others), 'other')} failed {'afterwards' if ordered else 'too'}" if others else ""
    if known is not None:
        title, cause, fix, name = f"{who}: {known.title}{where}", known.cause, known.fix, known.name
    elif first.type in _CRASHED:
        title, name = f"{who} crashed: {first.type}{where}{rest}", "crashed"
        cause, fix = _CRASHED[first.type]
    elif first.type == "SIGTERM" and first.root:
        title, name = f"{who} was ended (SIGTERM){rest}", "stopped"
        cause, fix = _SENT_FROM["SIGTERM"]
    elif first.type == "KeyboardInterrupt":
        title, name = f"{who} was interrupted (Ctrl+C){where}{rest}", "interrupted"
        cause = (
            "Ctrl+C was pressed or a program sent SIGINT; if the job hung before, this is the line at which it waited"
        )
        fix = "if it hung, compare the lines of all ranks (`py-spy dump`, or the dumps of the flight recorder)"
    elif first.killed:
        title, name = f"{who} was killed (SIGKILL){where}{rest}", "killed"
        cause, fix = _KILL
    else:
        how = "failed in the same way" if len(same) > 1 else "failed first" if others and ordered else "failed"
        title, name = f"{who} {how}: {shorter(first.says, 120)}{where}{rest}", "first_failure"
        cause = "this rank raised an exception or exited"
        if others:
            lost = "; the others lost a peer, or torchrun ended them"
            cause += lost if ordered else "; who failed first cannot be told: the lines have no times"
        if first.follows:
            cause = (
                "it lost the connection to another rank, or was ended because of it; the failure of that rank is not in"
            )
            cause += " these files, or left no message (killed, or its node failed)"
        fix = f"read the traceback in {_file(first.speaker.path)}"
        fix += f", line {first.order:,}" if first.order else ""
        if not first.text:
            fix = f"read what {who} wrote last; srun --label and torchrun --tee 3 say who wrote a line"
        if first.follows:
            fix = "look at the logs of the other ranks and nodes, and for oom-kill and Xid in `dmesg` of their nodes"
        if not first.text and first.root:
            fix = "torchrun saw no traceback: add its --log-dir, or decorate main with"
            fix += " torch.distributed.elastic.multiprocessing.errors.record"
    yield Finding(name, "wrong", title, says, cause, fix, tuple(sorted(ranks)[:_SHOWN]))


def _line_of(known: KnownError, failure: Failure) -> str:
    """What a failure says, or the line of its traceback by which it is known."""
    if re.search(known.pattern, failure.says, re.IGNORECASE):
        before, found, last = failure.says.partition("\nLast error:")  # of NCCL, after what torch says about it
        return f"{before.splitlines()[0]} {last}" if found else failure.says
    return next((line for line in failure.text.splitlines() if re.search(known.pattern, line)), failure.says)


def _is_before(first: Failure, other: Failure) -> bool:
    """Whether it is known that a failure came first: from torchrun, by times, or by the lines of one file."""
    if first.root or None not in (first.time, other.time):
        return True
    return first.speaker.path == other.speaker.path and 0 < first.order < other.order


def _file(path: Path) -> str:
    """The end of a path that tells the files of a job apart: `attempt_0/2/stderr.log`."""
    return shorter("/".join(path.parts[-3 if path.stem in ("stdout", "stderr", "error") else -1 :]), 60)


_ONLY_IN_LOGS = (  # errors that runs of the lab find by more than their message, or that are of other launchers
    KnownError(
        "ray_memory",
        r"running low on memory",
        "the memory of the host ran out, and Ray killed a worker",
        "Ray kills a worker when the memory of its node exceeds memory_usage_threshold (default: 0.95)",
        "use fewer workers per node or of the data loader, or ask for more memory of the host; load data in parts",
    ),
    KnownError(
        "ray_worker_died",
        r"actor died unexpectedly|actor is dead because its worker process has died|worker died or was killed while"
        r" executing",
        "a worker process of Ray ended without an exception",
        "the kernel killed it for lack of memory, it crashed, or its node was lost; the process that reports it only "
        "waited for it",
        "read the last lines of that worker (its pid is in the message) in /tmp/ray/session_latest/logs on its node, "
        "and look for oom-kill in `dmesg`",
    ),
    KnownError(
        "rendezvous_closed",
        r"RendezvousClosedError",
        "the node came to a rendezvous that had already closed",
        "the other nodes had finished or failed before, or the same --rdzv-id was used by an earlier job",
        "look for the error in the logs of the other nodes; use a new --rdzv-id for each job",
    ),
    KnownError(
        "out_of_memory",
        r"OutOfMemoryError|(?:CUDA|HIP|XPU) (?:error: )?out of memory|Cuda failure (?:\d+ )?'out of memory'"
        r"|CUBLAS_STATUS_ALLOC_FAILED",
        "a device ran out of memory",
        "what the rank allocated exceeded the free memory; the message says how much was asked for, and what was free",
        "use fewer samples per rank, activation checkpointing or FSDP; torch.cuda.memory._dump_snapshot writes what"
        " held the memory, which labkit explain reads",
    ),
    KnownError(
        "collective_mismatch",
        MISMATCH.pattern,
        "the ranks called different collectives, or the same one with different sizes",
        "the ranks took different branches, or their tensors differ in shape or dtype at this call",
        "compare the two calls that the message names; a collective belongs outside of branches that depend on the rank"
        " or its data, and every rank calls it with the same shape and dtype",
    ),
    KnownError(
        "collective_timeout",
        r"Timed out waiting \d+ms for (?:send|recv) operation",
        "a collective of gloo reached its timeout",
        "another rank never called it, called it later than the timeout (default: 30 minutes), or had ended",
        "look at the logs of the other ranks: one failed, or is at a different line (`py-spy dump` shows it); raise"
        " timeout= of init_process_group only if the ranks really differ by that much",
    ),
)


def _known(failure: Failure) -> KnownError | None:
    for known in _ONLY_IN_LOGS:
        if re.search(known.pattern, failure.says, re.IGNORECASE):
            return known
    found = known_in(failure.says) or known_in(failure.text)
    if found is not None and found.name == "worker_died":  # its own error, which says more, comes earlier in the chain
        found = known_in(failure.text)
    return found


_KILL = (
    "the process was killed from outside: by the kernel because memory ran out, by a scheduler or a person",
    "look for oom-kill in the output of Slurm, in `dmesg`, or for OOMKilled in `kubectl describe pod`; load less data"
    " in each rank, use fewer workers of the data loader, or ask for more memory of the host",
)
_BUS_ERROR = (
    "a page of memory could not be provided: most often /dev/shm is full, which has 64 MB in a container",
    "start the container with --shm-size=8g or --ipc=host; on Kubernetes mount an emptyDir with medium: Memory at"
    " /dev/shm",
)
_SEGMENTATION_FAULT = (
    "native code accessed wrong memory: an extension that was built for another torch, CUDA or Python, or a library"
    " that does not survive threads or a fork",
    "run with `python -X faulthandler`, which prints the stack; rebuild or update the extension that it names",
)
_CRASHED = {
    "SIGBUS": _BUS_ERROR,
    "Bus error": _BUS_ERROR,
    "SIGSEGV": _SEGMENTATION_FAULT,
    "Segmentation fault": _SEGMENTATION_FAULT,
}
_SENT_FROM = {
    "SIGTERM": (
        "a scheduler ended the job (preemption, time limit, kubectl delete), or a person did",
        "look for the reason at the scheduler (`sacct -j JOB`, `kubectl get events`); save checkpoints, and resume from"
        " them",
    ),
    "SIGHUP": (
        "the terminal or ssh session that started torchrun was closed",
        "start it within tmux, with `setsid nohup`, or as a job of the scheduler",
    ),
    "SIGINT": ("Ctrl+C was pressed, or a program sent it", "start the job again; it resumes from its last checkpoint"),
}
_STOPS = {
    "TIME LIMIT": (
        "the job reached its time limit",
        "the job needed longer than --time, or hung: compare the last lines of the ranks",
        "ask for more time, save checkpoints, and let Slurm signal before the end (#SBATCH --signal=TERM@300)",
    ),
    "PREEMPTION": (
        "the job was preempted",
        "a job with a higher priority needed the nodes",
        "save checkpoints, and let the job be requeued (#SBATCH --requeue)",
    ),
    "JOB REQUEUE": (
        "the job was stopped and queued again",
        "it was preempted, a node failed, or `scontrol requeue` was called",
        "nothing, if the script resumes from its last checkpoint; `sacct -j JOB --duplicates` lists the earlier starts",
    ),
    "NODE FAILURE": (
        "a node of the job failed",
        "Slurm lost the node, by a fault of its hardware or its network",
        "exclude the node (--exclude) and resume from the last checkpoint; tell the administrators its name",
    ),
}


def _cancelled(job: Job) -> re.Match[str] | None:
    """The line in which Slurm says that it ended the job, if possible with the reason. A step alone is also ended
    because one of its tasks has failed."""
    ended = [end for line in job.slurm if (end := _CANCELLED.search(line)) and _ends_job(end)]
    return max(ended, key=lambda end: bool(end["why"]), default=None)


def _ends_job(end: re.Match[str] | None) -> bool:
    """Whether a line of Slurm ends the job for a reason of its own."""
    return end is not None and end["why"] != "TASK FAILURE" and bool(end["why"] or end["what"] == "JOB")


def _out_of_host_memory(job: Job) -> Iterator[Finding]:
    """That a scheduler or the kernel killed a process for lack of memory."""
    killed = next((line for line in job.slurm if _KILLED_BY_SLURM.search(line)), None) or kernel.killed(job.kernel)
    memory = next((line for line in job.kubernetes if "OOMKilled" in line or "memory" in line), None)
    if killed or memory:
        tasks = [found for line in job.slurm if (found := _TASK_ENDED.search(line)) and "Memory" in found["how"]]
        where = f" on {tasks[0]['node']}" if tasks else ""
        ranks = sorted(fail.speaker.rank for fail in job.failures if fail.killed and fail.speaker.rank is not None)
        whom = ranks_in_words(ranks[:_SHOWN]) if ranks else "a process"
        yield Finding(
            "out_of_memory",
            "wrong",
            f"the memory of the host ran out{where}, and the kernel killed {whom}",
            killed or memory or "",
            "the processes of the node exceeded the memory that the job asked for (host memory, not GPU memory)",
            "ask for more (--mem, or resources.limits.memory); use fewer workers of the data loader; do not load the"
            " whole data or checkpoint in each rank",
            tuple(ranks[:_SHOWN]),
        )


def _stopped(job: Job, after_failure: bool) -> Iterator[Finding]:
    """What a scheduler ended."""
    memory = any(_out_of_host_memory(job))
    if job.kubernetes and not memory and not after_failure and not any(map(_POD_STOPPED.search, job.kubernetes)):
        yield Finding("killed", "wrong", "a container was killed (SIGKILL, exit code 137)", job.kubernetes[0], *_KILL)
    end = _cancelled(job)
    if end is not None and (end["why"] or not after_failure):
        usual = (
            f"Slurm cancelled the job{': ' + end['why'].lower() if end['why'] else ''}",
            "scancel was called, by a person or a script",
            "if nobody called it, ask the administrators of the cluster",
        )
        title, cause, fix = _STOPS.get(end["why"] or "", usual)
        lost = next(filter(None, map(_NODE_FAILED.search, job.slurm)), None)
        node = lost["node"] if lost else end["node"]
        yield Finding("stopped_by_scheduler", "wrong", f"{title} ({node}, {end['when']})", end[0], cause, fix)
    elif job.sent and not after_failure:
        title = f"the job was stopped from outside: torchrun received {job.sent}"
        yield Finding(
            "stopped_by_scheduler", "wrong", title, job.sent_line, *_SENT_FROM.get(job.sent, _SENT_FROM["SIGTERM"])
        )
    for line in list(filter(_POD_STOPPED.search, job.kubernetes))[:1]:
        yield Finding(
            "stopped_by_scheduler",
            "wrong",
            "Kubernetes ended a pod",
            line,
            "its node failed or was needed for a pod of higher priority, it was short of a resource, or the job reached"
            " activeDeadlineSeconds",
            "save checkpoints and resume from them; set requests equal to limits for memory and ephemeral storage; a"
            " PriorityClass protects from preemption, a longer activeDeadlineSeconds from the deadline",
        )


def _timeouts(job: Job) -> Iterator[Finding]:
    """Which collective reached its timeout, which ranks waited in it, and which had not called it."""
    first_rank, first = next(iter(job.timeouts.items()), (0, None))
    if first is None:
        return
    alike = {rank: timeout for rank, timeout in job.timeouts.items() if timeout.group == first.group}
    first_rank, first = min(alike.items(), key=lambda item: (item[1].number, item[0]))
    call = first.words + (f" ({job.failed_at})" if job.failed_at else "")
    waiting = sorted(rank for rank, timeout in alike.items() if timeout.number == first.number)
    called = {rank: number for (group, rank), number in job.called.items() if group == first.group}
    behind = sorted(rank for rank, number in called.items() if number < first.number and rank not in waiting)
    numbers = range(min(job.ranks), max(job.ranks) + 1) if first.of_all and max(job.ranks) < _MOST_EVENTS else ()
    silent = [rank for rank in numbers if rank not in alike and rank not in behind]
    other = next((rank for rank in waiting if alike[rank].op != first.op), None)
    if other is not None:
        title = f"rank {first_rank} called {first.words} and rank {other} {alike[other].words}"
        cause = "the ranks call different collectives at this point, so that they wait for each other"
        concerned = [first_rank, other]
    elif behind:
        title = f"{ranks_in_words(behind[:_SHOWN])} did not call {call}, in which the others waited"
        cause = "the rank took a different branch, failed, or was still busy"
        concerned = behind
    else:
        title = f"{call} reached its timeout on {ranks_in_words(waiting[:_SHOWN])}"
        cause = "the transfer hung, or a rank whose log is missing here did not call it"
        concerned = waiting
        if silent:
            title += f"; {ranks_in_words(silent[:_SHOWN])} did not report it"
            cause = "ranks that do not report it never called it, or were ended before their own timeout"
            concerned = silent
    evidence = f"{ranks_in_words(waiting[:_SHOWN])} waited {first.seconds:g} s in it"
    said = [f"rank {rank}: #{called[rank]}" for rank in [*behind, *waiting][:8] if rank in called]
    evidence += f"; called last: {', '.join(said)}" if said else ""
    yield Finding(
        "collective_timeout",
        "wrong",
        title,
        shorter(evidence),
        cause,
        "look at what these ranks did at that time: their logs, `py-spy dump`, or the dumps of the flight recorder"
        " (nccl_trace_rank_*, which `labkit explain` reads); a data loader or checkpoint that takes longer than the"
        " timeout needs init_process_group(timeout=…)",
        tuple(concerned[:_SHOWN]),
    )


def _blocked(job: Job) -> Iterator[Finding]:
    """Processes that NCCL's heartbeat monitor ended, if nothing else says why they hung."""
    if job.stuck and not (job.timeouts or any(not failure.follows for failure in job.failures)):
        ranks = sorted(job.stuck)[:_SHOWN]
        longest = max(job.stuck.values())
        yield Finding(
            "watchdog_blocked",
            "wrong",
            f"NCCL's watchdog was blocked{f' for {longest:,} s' if longest else ''} on {ranks_in_words(ranks)}",
            "the heartbeat monitor ended these processes, because their watchdog made no progress",
            "a call of CUDA or NCCL in this process does not return, most often because a kernel or a transfer hangs,"
            " or another thread holds Python's GIL within such a call",
            "look at the stacks of these ranks when it happens again (`py-spy dump --native`), and at the dumps of the"
            " flight recorder; TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC is the limit",
            tuple(ranks),
        )


# ---- tables, notes, figures

_SHOWN = 16


def _failure_table(job: Job) -> Table:
    rows = tuple(
        (failure.speaker.name, shorter(failure.says, 80), failure.line or "–", _clock(failure.time))
        for failure in job.failures[:_SHOWN]
    )
    several = len(rows) > 1 and not all(failure.follows for failure in job.failures)
    return Table("What failed, in this order", ("who", "error", "at", "time"), rows if several else (), ("error", "at"))


def _rank_table(job: Job) -> Table:
    """The last line of each rank, or of who else wrote, those that stopped first at the top."""
    by_name: dict[str, list[Speaker]] = {}
    for speaker in job.speakers:
        if speaker.lines:
            by_name.setdefault(speaker.name, []).append(speaker)
    rows = []
    for name, speakers in by_name.items():
        last = max(speakers, key=lambda speaker: (speaker.time or 0.0, speaker.ended))
        rows.append((last.time, name, sum(speaker.lines for speaker in speakers), last.last))
    rows.sort(key=lambda row: (row[0] is None, row[0] or 0.0))
    return Table(
        "The last line of each",
        ("who", "lines", "time", "line"),
        tuple((name, f"{lines:,}", _clock(at), shorter(text, 80)) for at, name, lines, text in rows[:_SHOWN]),
        ("line",),
    )


def _step_table(job: Job) -> Table:
    """What each rank has told of its training."""
    rows = []
    for rank, told in [*job.steps.items()][:_SHOWN]:
        steps = timed(told)
        losses = [logged.loss for logged in steps.values() if logged.loss is not None]
        seconds = [logged.seconds for logged in steps.values() if logged.seconds is not None]
        rows.append(
            (
                f"rank {rank}" if job.ranks else "the log",
                f"{min(steps):,} to {max(steps):,}",
                f"{len(steps):,}",
                f"{losses[0]:.4g} to {losses[-1]:.4g}" if losses else "–",
                milliseconds(median(seconds)) if seconds else "–",
            )
        )
    return Table("Training", ("who", "steps", "lines", "loss", "per step (median)"), tuple(rows))


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes, second = divmod(int(seconds) % 86_400, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{second:02}"


def _notes(job: Job) -> Iterator[str]:
    for log in job.logs:
        if log.cut:
            yield f"{shorter(log.path.name, 60)} is not read to its end: {log.cut}."
    if job.earlier:
        yield (
            f"torchrun started the ranks {counted(job.earlier + 1, 'time')}; this is about the last attempt. For an"
            " earlier one, name its folder, such as attempt_0."
        )
    if job.restarts:
        last = f"; the one before ended with {job.restarts[-1]}" if job.restarts[-1] else ""
        times = counted(len(job.restarts) + 1, "time")
        yield f"torchrun started the ranks {times}; this is about the last attempt{last}."
    newest = {rank: max(steps) for rank, steps in job.steps.items()}
    oldest = min(newest.values(), default=0)
    behind = [rank for rank, step in newest.items() if step == oldest]
    if len(behind) < len(newest) and not (job.failures or job.timeouts):
        yield (
            f"{ranks_in_words(behind[:_SHOWN])} told of step {oldest:,} last, others of step {max(newest.values()):,}:"
            " look there first if the job hung."
        )
    if any(speaker.thinned for speaker in job.speakers):
        yield f"Of more than {_MOST_STEPS:,} steps of a rank, some are left out, most of them early ones."
    unnamed = [speaker for speaker in job.speakers if speaker.rank is None and speaker.lines]
    if unnamed and not job.ranks:
        yield (
            "The lines do not say of which rank they are: start with torchrun --log-dir DIR --tee 3, or srun --label."
        )
    said = job.failures or job.timeouts or job.stuck or job.sent
    outside = job.slurm or job.kubernetes or job.kernel or job.nccl.warnings
    if not (said or outside or any(_not_finite(job))):
        yield "No error is in these lines. A job that hangs leaves its last lines; the flight recorder says more."
    follow = bool(job.failures) and all(
        failure.follows and not failure.root and failure.type != "KeyboardInterrupt" for failure in job.failures
    )
    explained = job.timeouts or job.kernel or any(finding.kind == "wrong" for finding in nccl.findings(job.nccl))
    if follow and not explained and _cancelled(job) is None:
        yield "All errors here follow from the end of another rank, whose log is not among these files."
    names = {speaker.name for speaker in job.speakers if speaker.lines}
    if len(names) > _SHOWN:
        yield f"The table has {_SHOWN} of {len(names):,} ranks or other writers of lines, those that stopped first."


def _figures(job: Job) -> dict[str, Any]:
    return {
        "kind": "logs",
        "ranks": job.ranks,
        "failures": [
            {
                "who": failure.speaker.name,
                "rank": failure.speaker.rank,
                "type": failure.type,
                "message": failure.message,
                "at": failure.line or None,
                "time": failure.time,
                "exit_code": failure.code,
                "consequence": failure.follows,
                "file": str(failure.speaker.path),
            }
            for failure in job.failures[:1024]
        ],
        "timeouts": [
            {"rank": rank, "group": timeout.group, "op": timeout.op, "number": timeout.number}
            for rank, timeout in sorted(job.timeouts.items())
        ],
        "steps": {
            rank: [
                {"step": step, "loss": finite(logged.loss), "seconds": logged.seconds}
                for step, logged in timed(steps).items()
            ]
            for rank, steps in job.steps.items()
        },
        "scheduler": [*job.slurm, *job.kubernetes][:256],
        "kernel": job.kernel[:256],
        "nccl": nccl.figures(job.nccl) if job.nccl else None,
    }
