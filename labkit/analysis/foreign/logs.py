"""Logs of a job: torchrun's `--log-dir`, the output of Slurm, Kubernetes, mpirun, Ray and pdsh, and plain text in which
the lines of ranks are interleaved: which rank failed first, and why. `log_lines.py` reads them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any

from labkit.analysis.diagnose.finding import Finding, shorter
from labkit.analysis.diagnose.hang import MISMATCH
from labkit.analysis.diagnose.known_errors import KnownError, known_in
from labkit.analysis.foreign import Page, Table, nccl, present
from labkit.analysis.foreign.log_lines import (
    KILLED_BY_KERNEL,
    MOST_EVENTS,
    MOST_STEPS,
    POD_STOPPED,
    SIGNALS,
    XID,
    Failure,
    Log,
    Logged,
    Speaker,
    by_cause,
    exception_in,
    name_of_signal,
    ranks_of_path,
    seconds_of,
)
from labkit.analysis.metrics import median
from labkit.common.units import counted, milliseconds, ranks_in_words
from labkit.record import events
from labkit.record.events import OfRank

# ---- the job

_RANKS_OF = re.compile(r"(\d+) \(local_rank: (\d+)\)")
_CANCELLED = re.compile(
    r"(?P<what>JOB|STEP) [\w.+]+ ON (?P<node>\S+) CANCELLED AT (?P<when>\S+)"
    r"(?: DUE (?:TO|to) (?P<why>[A-Z][A-Za-z ]*[A-Za-z]))?"
)
_TASK_ENDED = re.compile(r"srun: error: (?P<node>[^\s:]+): tasks? (?P<tasks>[\d,\-]+): (?P<how>.+)")
_KILLED_BY_SLURM = re.compile(r"[Dd]etected \d+ oom[-_]kill event|oom[-_]kill event")
_NODE_FAILED = re.compile(r"Node failure on (?P<node>[\w.,\[\]-]+)")


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
            log.path.parents[2]
            for log in self.logs
            if ranks_of_path(log.path)[1] is not None and log.path.is_absolute()
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
        return sorted(found, key=by_cause)

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
            kind, message = exception_in(said.rpartition("\n")[2].strip()) if not ended else (ended[1], "")
            speaker = Speaker(log.path, local=int(ranks[2]), rank=rank)
            kind = kind or f"exit code {code[0] if code else '?'}"
            by_rank[rank] = Failure(speaker, kind, message, said if "\n" in said else "", None)
            found.append(by_rank[rank])
        failure = by_rank[rank]
        failure.code = int(code[0]) if code else None
        failure.root = failure.root or bool(block.get("root"))
        if failure.time is None:
            failure.time = seconds_of(block.get("time", ""), 2000)

    def _add_agent(self, log: Log, local: int, code: int, found: list[Failure], by_rank: dict[int, Failure]) -> None:
        """A process whose end torchrun or DeepSpeed tells, without a list of failures."""
        known = self._of_local.get(local, {local})
        kind = name_of_signal(-code) if code < 0 else f"exit code {code}"
        if len(known) > 1 or not self._alone:
            if not found:
                found.append(Failure(Speaker(log.path, local=local), kind, "", code=code))
            return
        rank = next(iter(known))
        self._adopt(log, rank, found, by_rank)
        if rank not in by_rank:
            speaker = Speaker(log.path, local=local, rank=rank)
            by_rank[rank] = Failure(speaker, kind, "")
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
            kind = f"exit code {code[1]}" if code else SIGNALS.get(ended["how"].strip(), shorter(ended["how"], 60))
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
            rank = speaker.rank
            if rank is None and not self.ranks:
                rank = 0
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
    """The ranks, and the steps of each; steps whose line was not written are not there."""
    yield from present(sorted({*ranks, *steps}))
    for rank, of_rank in steps.items():
        for step, logged in _timed(of_rank).items():
            seconds = events.StepSeconds(step=logged.seconds)
            yield events.Step(t=logged.time or 0.0, rank=rank, step=step, loss=logged.loss, seconds=seconds)


def _timed(steps: Mapping[int, Logged]) -> dict[int, Logged]:
    """The steps in order. Where a line has no seconds, they are from its time and that of the previous line, and count
    everything between them, evaluations and checkpoints included."""
    ordered: dict[int, Logged] = {}
    before: tuple[int, float] | None = None
    for step, logged in sorted(steps.items()):
        seconds = logged.seconds
        if seconds is None and before is not None and logged.time is not None and logged.time > before[1]:
            seconds = (logged.time - before[1]) / (step - before[0])
        ordered[step] = logged._replace(seconds=seconds)
        if logged.time is not None:
            before = step, logged.time
    return ordered


_FROM_A_PEER = ("nccl_unreachable", "nccl_transfer_failed")  # also reported because the process of a peer has ended


def _is_own(failure: Failure) -> bool:
    """Whether a failure is neither one of NCCL nor a consequence of another one."""
    known = _known(failure)
    return not failure.follows and (known is None or known.name != "nccl")


def _findings(job: Job) -> Iterator[Finding]:
    of_nccl = [*nccl.findings(job.nccl)]
    left_out = _FROM_A_PEER if job.failures and _is_own(job.failures[0]) else ()
    wrong = [finding for finding in of_nccl if finding.kind == "wrong" and finding.name not in left_out]
    memory, hardware = [*_out_of_host_memory(job)], [*_failed_gpus(job)]
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
    lost = {rank: found for rank, steps in job.steps.items() if (found := _first_not_finite(steps))}
    if not lost:  # of trainers that tell no step
        without = [(speaker.path, *speaker.no_value) for speaker in job.speakers if speaker.no_value]
        for path, line, said in without[:1]:
            where = f"line {line:,} of {_file(path)}"
            yield Finding("nan_loss", f"the loss is {said} in {where}", f"{where}: loss {said}", *_NAN)
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
        f"the loss becomes {loss:g} {when}" if before else f"the loss is {loss:g} from the first line on",
        evidence,
        *_NAN,
        ranks=(rank,),
    )


def _first_not_finite(steps: Mapping[int, Logged]) -> tuple[int, float] | None:
    """The first step whose loss is NaN or infinite, and that loss."""
    for step, logged in sorted(steps.items()):
        if logged.loss is not None and not math.isfinite(logged.loss):
            return step, logged.loss
    return None


def _finite(number: float | None) -> float | None:
    """The number; None for NaN and infinity, which JSON does not have."""
    return number if number is not None and math.isfinite(number) else None


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
        cause, fix = (
            _FOLLOWS if first.follows else ("this rank raised an exception or exited", _where_to_read(first, who))
        )
        if others and not first.follows:
            lost = "the others lost a peer, or torchrun ended them"
            cause += f"; {lost if ordered else 'who failed first cannot be told: the lines have no times'}"
        if not first.text and first.root:
            fix = (
                "torchrun saw no traceback: add its --log-dir, or decorate main with"
                " torch.distributed.elastic.multiprocessing.errors.record"
            )
    yield Finding(name, title, says, cause, fix, ranks=tuple(sorted(ranks)[:_SHOWN]))


def _where_to_read(failure: Failure, who: str) -> str:
    if not failure.text:
        return f"read what {who} wrote last; srun --label and torchrun --tee 3 say who wrote a line"
    line = f", line {failure.order:,}" if failure.order else ""
    return f"read the traceback in {_file(failure.speaker.path)}{line}"


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
        "aborted_at_exit",
        r"^terminate called without an active exception",
        "the C++ runtime aborted the process, as can happen after a complete training",
        "if the training had ended: Python shut down while a thread of gloo still freed a tensor of the last"
        " collective; if not: a thread of native code was destroyed or ended while it ran",
        "look at the last line of this rank: if the training had ended, its results are whole, and a barrier at the end"
        " of the script gives gloo's threads time; if not, run with `python -X faulthandler`",
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
_FOLLOWS = (
    "it lost the connection to another rank, or was ended because of it; the failure of that rank is not in these"
    " files, or left no message (killed, or its node failed)",
    "look at the logs of the other ranks and nodes, and for oom-kill and Xid in `dmesg` of their nodes",
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
    killed = next((line for line in job.slurm if _KILLED_BY_SLURM.search(line)), "")
    if not killed:  # of the lines of the kernel, rather the one that names the process
        said = [line for line in job.kernel if KILLED_BY_KERNEL.search(line)]
        killed = next((line for line in said if "Kill" in line), said[0] if said else "")
    memory = next((line for line in job.kubernetes if "OOMKilled" in line or "memory" in line), None)
    if killed or memory:
        tasks = [found for line in job.slurm if (found := _TASK_ENDED.search(line)) and "Memory" in found["how"]]
        where = f" on {tasks[0]['node']}" if tasks else ""
        ranks = sorted(fail.speaker.rank for fail in job.failures if fail.killed and fail.speaker.rank is not None)
        whom = ranks_in_words(ranks[:_SHOWN]) if ranks else "a process"
        yield Finding(
            "out_of_memory",
            f"the memory of the host ran out{where}, and the kernel killed {whom}",
            killed or memory or "",
            "the processes of the node exceeded the memory that the job asked for (host memory, not GPU memory)",
            "ask for more (--mem, or resources.limits.memory); use fewer workers of the data loader; do not load the"
            " whole data or checkpoint in each rank",
            ranks=tuple(ranks[:_SHOWN]),
        )


_HARDWARE = {  # numbers of Xid (docs.nvidia.com/deploy/xid-errors); others report a program, or a process that stopped
    48: "an uncorrectable error of its memory (ECC)",
    62: "its microcontroller halted",
    64: "a row of its memory could not be replaced",
    74: "an error of NVLink",
    79: "it has fallen off the bus",
    94: "a contained error of its memory (ECC)",
    95: "an uncontained error of its memory (ECC)",
    119: "its firmware (GSP) does not answer",
    120: "an error of its firmware (GSP)",
    140: "an unrecovered error of its memory (ECC)",
    149: "a fatal error of NVLink",
}


def _failed_gpus(job: Job) -> Iterator[Finding]:
    """The first GPU that failed."""
    errors = [error for line in job.kernel if (error := XID.search(line)) and int(error["code"]) in _HARDWARE]
    if not errors:
        return
    first, gpus = errors[0], {error["gpu"] for error in errors}
    yield Finding(
        "gpu_fault",
        f"the GPU {shorter(first['gpu'], 30)} failed: {_HARDWARE[int(first['code'])]} (Xid {first['code']})"
        + (f"; {len(gpus) - 1} more reported errors" if len(gpus) > 1 else ""),
        shorter("; ".join(error[0] for error in errors[:4])),
        "a defect of the GPU, its memory, its link or its power supply, not of the script",
        "leave the node out (Slurm: --exclude), resume from the last checkpoint, and tell the administrators its name"
        " and the Xid; `nvidia-smi -q -d ECC,ROW_REMAPPER` and `nvidia-smi nvlink -e` show more",
    )


def _stopped(job: Job, after_failure: bool) -> Iterator[Finding]:
    """What a scheduler ended."""
    stopped = next(filter(POD_STOPPED.search, job.kubernetes), "")
    if job.kubernetes and not stopped and not after_failure and not any(_out_of_host_memory(job)):
        yield Finding("killed", "a container was killed (SIGKILL, exit code 137)", job.kubernetes[0], *_KILL)
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
        yield Finding("stopped_by_scheduler", f"{title} ({node}, {end['when']})", end[0], cause, fix)
    elif job.sent and not after_failure:
        title = f"the job was stopped from outside: torchrun received {job.sent}"
        yield Finding("stopped_by_scheduler", title, job.sent_line, *_SENT_FROM.get(job.sent, _SENT_FROM["SIGTERM"]))
    if stopped:
        yield Finding(
            "stopped_by_scheduler",
            "Kubernetes ended a pod",
            stopped,
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
    numbers = range(min(job.ranks), max(job.ranks) + 1) if first.of_all and max(job.ranks) < MOST_EVENTS else ()
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
        title,
        shorter(evidence),
        cause,
        "look at what these ranks did at that time: their logs, `py-spy dump`, or the dumps of the flight recorder"
        " (nccl_trace_rank_*, which `labkit explain` reads); a data loader or checkpoint that takes longer than the"
        " timeout needs init_process_group(timeout=…)",
        ranks=tuple(concerned[:_SHOWN]),
    )


def _blocked(job: Job) -> Iterator[Finding]:
    """Processes that NCCL's heartbeat monitor ended, if nothing else says why they hung."""
    if job.stuck and not (job.timeouts or any(not failure.follows for failure in job.failures)):
        ranks = sorted(job.stuck)[:_SHOWN]
        longest = max(job.stuck.values())
        yield Finding(
            "watchdog_blocked",
            f"NCCL's watchdog was blocked{f' for {longest:,} s' if longest else ''} on {ranks_in_words(ranks)}",
            "the heartbeat monitor ended these processes, because their watchdog made no progress",
            "a call of CUDA or NCCL in this process does not return, most often because a kernel or a transfer hangs,"
            " or another thread holds Python's GIL within such a call",
            "look at the stacks of these ranks when it happens again (`py-spy dump --native`), and at the dumps of the"
            " flight recorder; TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC is the limit",
            ranks=tuple(ranks),
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
        steps = _timed(told)
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
        yield f"Of more than {MOST_STEPS:,} steps of a rank, some are left out, most of them early ones."
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
                {"step": step, "loss": _finite(logged.loss), "seconds": logged.seconds}
                for step, logged in _timed(steps).items()
            ]
            for rank, steps in job.steps.items()
        },
        "scheduler": [*job.slurm, *job.kubernetes][:256],
        "kernel": job.kernel[:256],
        "nccl": nccl.figures(job.nccl) if job.nccl else None,
    }
