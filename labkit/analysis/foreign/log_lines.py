"""The lines of a job's logs: who wrote each follows from its prefixes or from the file, and what a rank failed with
from its traceback, from the lines of torch's C++ code, and from torchrun's summary; and the steps of a training that
are told in them."""

from __future__ import annotations

import calendar
import codecs
import math
import re
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from labkit.analysis.diagnose.finding import shorter
from labkit.analysis.foreign import ForeignError, nccl
from labkit.analysis.foreign.reading import Content, rank_in_name
from labkit.common.files import open_regular
from labkit.record.ranks import PEER_GONE
from labkit.record.stacks import LIBRARIES, MESSAGE_LIMIT, TEXT_LIMIT, clipped, error_in, place

_LONGEST = 1 << 14  # characters of a line
_MOST_SPEAKERS = 1 << 16
_MOST_ERRORS = 8  # of a speaker
MOST_EVENTS = 4096  # lines of Slurm, Kubernetes, watchdogs and torchrun that are kept of a file
_MOST_LINES = 400  # of a traceback
MOST_STEPS = 100_000  # of a speaker
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
    r"|^(?P<unwound>terminate called without an active exception)|Caught signal \d+ \((?P<ucx>[^:)]+)"
    r"|^(?P<shell>Segmentation fault|Bus error|Illegal instruction|Aborted)(?: \(core dumped\))?\s*$"
)
SIGNALS = {
    "Killed": "SIGKILL",
    "Terminated": "SIGTERM",
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
}
_KILLED_BY_SHELL = re.compile(rf": line \d+: +\d+ ({'|'.join(SIGNALS)})\b")
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

_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # as PowerShell redirects
_MESSAGE_KEYS = ("message", "msg", "log", "event")  # of a line of JSON, with the text of the line
_TIME_KEYS = ("time", "timestamp", "ts", "@timestamp", "asctime")
_MORE_KEYS = ("exception", "exc_info", "stack_trace")  # with a traceback

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
POD_STOPPED = re.compile(
    r"\bEvicted\b|DeadlineExceeded|\bPreempt(?:ed|ing)\b|TaintManagerEviction|NodeNotReady|NodeLost|NodeShutdown"
)
_IN_KUBERNETES = re.compile(
    rf"OOMKilled|exit(?:ed with)? code 137|Exit Code: +137|low on resource: memory|{POD_STOPPED.pattern}"
)
# of the kernel's log: a GPU that failed, as NVIDIA's driver reports it, and a process that was killed
XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<gpu>[\w:.]+)\): (?P<code>\d{1,3})\b,? ?(?P<says>.*)")
KILLED_BY_KERNEL = re.compile(
    r"[Oo]ut of memory: Kill(?:ed)? process|invoked oom-killer|oom-kill:constraint|oom_reaper: reaped"
)


class Logged(NamedTuple):
    """What a line says of a step: its loss and its seconds, and when the line was written (seconds since 1970)."""

    loss: float | None
    seconds: float | None
    time: float | None


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


def by_cause(failure: Failure) -> tuple[bool, bool, float, int]:
    """A key that sorts failures: what follows from another one last, torchrun's root cause first, then by time."""
    return failure.follows, not failure.root, failure.time if failure.time is not None else float("inf"), failure.order


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
        if len(self.steps) > MOST_STEPS:
            kept = dict([*self.steps.items()][::2])
            lost = {known: self.steps[known] for known in self.lost or () if known in self.steps}
            self.steps, self.thinned = dict(sorted((kept | lost).items())), True

    @property
    def time(self) -> float | None:
        """Seconds since 1970 of the last time in its lines."""
        return seconds_of(self.when, self.year)

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
        if not own:
            return None
        return own[0] if self.several else own[-1]

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
    if path.suffix in _SUFFIXES[:4]:
        # a file system may leave a hole of zeros in it, a program bytes of other encodings
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
        self._rank, self._local = ranks_of_path(path)
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
        lines = [text]
        if text.startswith('{"'):
            lines = _of_json(text)
        elif text.count("[rank") > 1:
            lines = _GLUED.split(text)
        for line in lines:
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
                log.sent = name_of_signal(int(name)) if name.isdecimal() else name, shorter(text)
        elif "will restart worker group" in text:
            self._restart()
        elif ":" in text or "Cause" in text:
            self._add_summary(speaker, text)
        self._add_outside(text)

    def _add_outside(self, text: str) -> None:
        """A line of the kernel, of Slurm or of Kubernetes."""
        log = self._log
        of_kernel = "NVRM" in text or "oom" in text or "f memory: Kill" in text
        if of_kernel and (XID.search(text) or KILLED_BY_KERNEL.search(text)):
            log.kernel += [shorter(text)] if len(log.kernel) < MOST_EVENTS else []
        elif ("srun" in text or "slurm" in text or "oom" in text) and _IN_SLURM.search(text):
            log.slurm += [shorter(text)] if len(log.slurm) < MOST_EVENTS else []
        elif ("xit " in text or "Reason" in text or "memory" in text or "od" in text) and _IN_KUBERNETES.search(text):
            log.kubernetes += [shorter(text)] if len(log.kubernetes) < MOST_EVENTS else []

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
            if not text.startswith(_TRACEBACK):
                speaker.lead = _DIGITS.sub("0", lead) if begins else ""
            speaker.begun = self._log.lines
            speaker.open = [begins + rest or text]
        elif speaker.open:
            self._go_on(speaker, text)
        elif text.startswith(_NO_FAILURE):
            speaker.ignored, speaker.message = True, None
        elif (text.startswith(_CRASHES) or "Caught signal" in text) and (crash := _CRASH.search(text)):
            kind = next(filter(None, crash.groups()))
            self._failed(Failure(speaker, kind, "", text, speaker.time, self._log.lines))
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
            self._add_end(speaker, int(killed["rank"]), name_of_signal(int(killed["signal"])))
        elif ": line " in text and (killed := _KILLED_BY_SHELL.search(text)):
            self._failed(Failure(speaker, SIGNALS[killed[1]], "", "", speaker.time, self._log.lines))
        else:
            return False
        return True

    def _add_end(self, speaker: Speaker, rank: int, kind: str) -> None:
        """How a rank ended, as mpirun says it."""
        said = Speaker(speaker.path, rank=rank)
        self._failed(Failure(said, kind, "", "", speaker.time, self._log.lines))
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
        kind, message = exception_in(text)
        if kind and speaker.ignored:
            speaker.ignored = False
        elif kind == "ProcessExitedException" and (ended := _SPAWN_ENDED.search(message)):
            said = self._of_spawn(int(ended["process"]))
            how = ended["signal"] or f"exit code {ended['code']}"
            self._failed(Failure(said, how, "", clipped(traced), speaker.time, speaker.begun))
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
            self._failed(failure)
            speaker.whole = traced.split("\n")[-_MOST_LINES:]

    def _of_spawn(self, local: int) -> Speaker:
        """A process of torch.multiprocessing.spawn."""
        return self._speakers.setdefault(("spawn", local), Speaker(self._log.path, local=local, year=self._year))

    def _restart(self) -> None:
        """torchrun starts all ranks again: what they failed with before does not end the job."""
        failures = [speaker.failure for speaker in self._speakers.values() if speaker.failure is not None]
        first = min(failures, key=by_cause, default=None)
        if len(self._log.restarts) < MOST_EVENTS:
            self._log.restarts.append(f"{first.speaker.name}: {shorter(first.says, 120)}" if first else "")
        for speaker in self._speakers.values():
            self._close(speaker)
            speaker.failures, speaker.bare = [], None
        self._log.timeouts, self._log.called, self._log.stuck, self._log.agent = {}, {}, {}, []

    @staticmethod
    def _failed(failure: Failure) -> None:
        speaker = failure.speaker
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
        if (found := _WATCHDOG.search(text)) and len(log.timeouts) < MOST_EVENTS:
            timeout = Timeout(found["group"] or "", found["op"], int(found["number"]), int(found["limit"]) / 1000)
            log.timeouts.setdefault(int(found["rank"]), timeout)
            if speaker.local is not None and speaker.rank is None:
                speaker.rank = int(found["rank"])
        if (found := _PROGRESS.search(text)) and len(log.called) < MOST_EVENTS:
            rank, group = int(found["rank"]), found["group"] or ""
            log.called.setdefault((group, rank), int(found["called"]))
            known = log.timeouts.get(rank)
            if known is not None and not known.group and found["at"] == str(known.number):
                log.timeouts[rank] = replace(known, group=group)
        if found := _DIED.search(text):
            self._add_death(speaker, found)
        if (found := _STUCK.search(text)) and len(log.stuck) < MOST_EVENTS:
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
        if said and len(log.agent) < MOST_EVENTS:
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
                if found["key"] == "traceback" and len(log.summary) < MOST_EVENTS:
                    log.summary.append(block)
                    speaker.told = block if speaker.open else None  # of a function with torch's decorator `record`
                    self._block[pod] = None


def exception_in(text: str) -> tuple[str, str]:
    """Type and message of the last line of a traceback; two empty texts for any other line."""
    found = _EXCEPTION.match(text)
    return error_in(text) or ((found["type"].rpartition(".")[2], found["message"] or "") if found else ("", ""))


def _of_json(text: str) -> list[str]:
    """The lines of a message that a logger or Docker has written as JSON, with its time and rank as prefixes; the text
    itself if it is none."""
    try:
        said = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return [text]
    if not isinstance(said, dict) or not (
        parts := [said[key] for key in _MESSAGE_KEYS if isinstance(said.get(key), str)]
    ):
        return [text]
    when = next((said[key] for key in _TIME_KEYS if isinstance(said.get(key), str)), "")
    rank = next((said[key] for key in ("rank", "global_rank") if type(said.get(key)) is int and said[key] >= 0), None)
    prefix = (f"{when} " if _TIME.fullmatch(when) else "") + (f"[rank{rank}]: " if rank is not None else "")
    more = [said[key] for key in _MORE_KEYS if isinstance(said.get(key), str)]
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


def ranks_of_path(path: Path) -> tuple[int | None, int | None]:
    """The rank and the local rank that the name of a file says: `rank_3.log`, or `attempt_0/3/stderr.log`."""
    named = rank_in_name(path)
    if named is not None:
        return named, None
    local = path.parent.name
    of_torchrun = path.stem in ("stdout", "stderr", "error") and local.isdecimal() and len(local) < 6
    return None, int(local) if of_torchrun else None


def name_of_signal(number: int) -> str:
    """`SIGKILL`, or the number of a signal that this system does not know."""
    return signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"


def seconds_of(text: str, year: int) -> float | None:
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
    rank, local = ranks_of_path(path)
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


# ---- steps of a training, as trainers print them; numbers of an evaluation are left out
#
# | who prints | a line |
# | --- | --- |
# | Megatron-LM | `iteration 100/ 5000 … elapsed time per iteration (ms): 250.3 … lm loss: 2.345E+00 …` |
# | torchtitan | `step: 10  loss:  7.1234  memory: 30.1GiB(38%)  tps: 3,112` |
# | nanoGPT | `iter 100: loss 2.3100, time 120.30ms, mfu 10.1%` |
# | DeepSpeed | `steps: 100 loss: 2.31 iter time (s): 0.25` |
# | torch's ImageNet example | `Epoch: [1][ 10/500]  Time  0.310 ( 0.5)  Loss 6.9e+00 (7.0e+00)` |
# | many scripts | `step 100, loss 2.31`, `Step 100/1000 - train_loss=2.31` |

_STEP = re.compile(
    r"(?<![\w.-])(?:global[ _]?|train(?:ing)?[ _]?|optimizer[ _]?)?(?:steps?|iter(?:ation)?s?)"
    r"['\"]?(?: *[:=#\[(] *| +)(?P<step>\d[\d,]{0,12})(?![\w.%])"
)
_OF_EPOCH = re.compile(r"epoch:? *\[(?P<epoch>\d{1,6})\] *\[ *(?P<step>\d{1,9}) */ *(?P<of>\d{1,9})\]")
_LOSS = re.compile(  # begins with a fixed text, for which a line is searched fast
    r"loss['\"]?(?: *[:=] *| +)"
    r"(?P<loss>[-+]?(?:\d{1,12}(?:\.\d{0,20})?(?:e[-+]?\d{1,3})?|nan|inf(?:inity)?))(?![\w%])"
)
_WHICH = re.compile(r"(?<![a-z])(?:(?:train(?:ing)?|lm|total|mean|avg|average|global_avg)[ _/-]?)?$")  # loss it is
_EVALUATED = re.compile(r"(?<![a-z])(?:val(?:id(?:ation)?)?|eval(?:uation)?|test|dev)[ _/:-]{0,3}$")
_LONGEST_WORD = 16  # characters of what these two match, and of what stands before
_NUMBER = r"(?P<{}>\d{{1,9}}(?:\.\d{{0,9}})?(?:e[-+]?\d{{1,2}})?)"
_UNITS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "secs": 1.0, "seconds": 1.0}
_UNIT = "|".join(_UNITS)
_TIMES = (
    re.compile(
        r"(?:elapsed )?(?:time (?:per|/) ?(?:iter(?:ation)?|step)|(?:iter(?:ation)?|step|batch)[ _]?time)"
        rf"(?: *\((?P<before>{_UNIT})\))? *[:=]? *{_NUMBER.format('value')} ?(?P<after>{_UNIT})?(?!\w)"
    ),
    re.compile(rf"(?<!\w)time:? *{_NUMBER.format('value')} ?(?P<after>ms)(?!\w)"),  # not of all steps
    re.compile(rf"(?<!\w){_NUMBER.format('value')} ?(?P<after>{_UNIT}) ?/ ?(?:it|iter|step)(?!\w)"),
)
_OF_A_METER = re.compile(rf"\btime +{_NUMBER.format('value')} *\(")  # of torch's ImageNet example
_PER_SECOND = re.compile(rf"(?<!\w){_NUMBER.format('value')} ?(?:it|iters?|steps?)/s(?:ec)?(?!\w)")


def step_in(text: str) -> tuple[int, float | None, float | None] | None:
    """The number, the loss and the seconds of the step that a line is about; None if it is about none."""
    text = text.lower()  # the patterns are in lower case: ignoring case takes three times as long
    loss = _loss(text)
    numbered = _OF_EPOCH.search(text)
    if numbered:
        step = int(numbered["epoch"]) * int(numbered["of"]) + int(numbered["step"])
    elif found := _STEP.search(text):
        step = int(found["step"].replace(",", ""))
    else:
        return None
    seconds = _seconds(text, of_a_meter=bool(numbered))
    return None if loss is None and seconds is None else (step, loss, seconds)


def _loss(text: str) -> float | None:
    for match in _LOSS.finditer(text):
        which = _WHICH.search(text, max(0, match.start() - _LONGEST_WORD), match.start())
        if which and not _EVALUATED.search(text, max(0, which.start() - _LONGEST_WORD), which.start()):
            return float(match["loss"])
    return None


def _seconds(text: str, of_a_meter: bool) -> float | None:
    for pattern in _TIMES:
        if found := pattern.search(text):
            unit = found["after"] or found.groupdict().get("before")
            return float(found["value"]) * _UNITS[unit] if unit else None
    if of_a_meter and (found := _OF_A_METER.search(text)):
        return float(found["value"])
    if (found := _PER_SECOND.search(text)) and float(found["value"]) > 0:
        return 1 / float(found["value"])
    return None
