"""Exercises of lab 09: the number of workers that hide loading, a data loader to fix, and one to write, which reads
shards and resumes on another number of ranks."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from labkit.analysis.metrics import median, phase_seconds
from labkit.common.units import counted, size
from labkit.course.answers import Wrong, finished, require_function, source
from labkit.course.build import criteria
from labkit.course.build.criteria import check_class, solution
from labkit.course.build.trials.loader_task import OBSERVED, SHARD, STATE, TASK, Task, digests, draw, write
from labkit.course.exercises import Exercise

# ---- workers that hide loading


BATCH = 64  # samples per rank and step in the script to fix
MIN_STEPS = 8  # for a meaningful median
MIN_SLEEP = 1e-3  # seconds per batch of the simulated slow disk
_CASES = ((0.2, 0.1), (0.25, 0.1), (0.1, 0.1), (0.1, 0.2), (2.0, 0.25))  # seconds to load and to compute


def _workers(answer: Any) -> str:
    require_function(answer, "of load and compute")
    for load, compute in _CASES:
        given = answer(load, compute)
        case = f"load {1e3 * load:.0f} ms, compute {1e3 * compute:.0f} ms: your function returns {given!r}"
        if isinstance(given, bool) or not isinstance(given, (int, float)) or given != int(given):
            raise Wrong(f"{case}, but num_workers must be an integer")
        if given < 1:
            raise Wrong(f"{case}; without workers every step waits for its batch, however fast loading is")
        if load / given > compute:
            raise Wrong(
                f"{case}; then a batch is ready every {1e3 * load / given:.0f} ms, which is slower than training"
            )
        if given > 1 and load / (given - 1) <= compute:
            raise Wrong(f"{case}; one worker fewer is enough")
    return (
        f"right for {len(_CASES)} pairs of times: the workers load batches at least as fast as training consumes them"
    )


def _mend(answer: Any) -> str:
    run = finished(answer)
    text, steps = source(run), run.state.ranks[0].steps
    slept = [float(seconds) for seconds in re.findall(r"time\.sleep\(([\d.]+)\)", text)]
    if len(steps) < MIN_STEPS:
        raise Wrong(f"the run must have at least {MIN_STEPS} steps, got {len(steps)}")
    if run.state.world_size < 2:
        raise Wrong("the world size must be 2, got 1")
    if (samples := median(steps.samples)) != BATCH:
        raise Wrong(f"a rank must process {BATCH} samples per step as before, got {samples:.0f}")
    if not slept or max(slept) < MIN_SLEEP:
        raise Wrong("time.sleep in the data set was removed or shortened; restore it, and change the loader instead")
    waits, took = phase_seconds(run.state, 0)["data"] or 0.0, max(slept)
    title = next((finding.title for finding in run.findings() if finding.name == "input_bound"), None)
    if title or waits > took / 2:
        raise Wrong(
            f"still: {title or 'too much of a step is waiting for data'}: {1e3 * waits:.1f} ms, while a batch takes "
            f"{1e3 * took:.0f} ms to load; which processes could load the batches, and how many of them are needed?"
        )
    return f"a batch still takes {1e3 * took:.0f} ms to load, and a step waits only {1e3 * waits:.1f} ms for it"


# ---- the runs of a loader, and what was observed in them


_SCRIPT = """\
# A loader in the ranks of three runs, which are plain processes: python train.py FOLDER
# The first two lines read this file, and run what follows with the task and the shards in FOLDER.
import sys

from labkit.course.build.trials.input_pipeline import run_loader

run_loader(__file__, "{answer}", sys.argv[1])
sys.exit()
# ---- the answer
{source}
"""
Sample = tuple[int, int]  # a shard, and the index of a sample in it
Batches = list[list[Sample]]


@dataclass
class Rank:
    """What one rank of a run got: by epoch its batches; and the shards that its processes opened, as (shard, process,
    bytes in memory, epoch, whether it has got a batch of any epoch)."""

    rank: int
    pid: int = 0
    epochs: list[Batches] = field(default_factory=list)
    opens: list[tuple[int, int, int, int, bool]] = field(default_factory=list)
    state_bytes: int = 0
    ended: bool = False
    error: str = ""
    forbidden: str = ""


def observe(answer: Any, task: Task) -> list[list[Rank]]:
    """The ranks of each run that was made."""
    if not hasattr(os, "fork"):
        raise Wrong("this exercise forks its ranks, which this system cannot do; use Linux or macOS")
    written = criteria.written_down(answer)
    with tempfile.TemporaryDirectory(prefix="labkit-loader-") as name:
        folder = Path(name)
        files = write(task, folder / "shards")
        known = {
            digest: (shard, index)
            for shard, file in enumerate(files)
            for index, digest in enumerate(digests(np.load(file)))
        }
        (folder / TASK).write_text(json.dumps(task.to_json(files)), encoding="utf-8")
        criteria.run_alone(_SCRIPT.format(answer=written.name, source=written.text), folder)
        try:
            runs = json.loads((folder / OBSERVED).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise Wrong("the answer must run: the ranks ended without a result, or took too long") from None
    return [[_rank(rank, said, known) for rank, said in enumerate(run)] for run in runs]


def _rank(number: int, said: Sequence[dict[str, Any]], known: dict[str, Sample]) -> Rank:
    rank, began = Rank(number), False
    for message in said:
        if "epoch" in message:
            rank.epochs.append([])
        elif "batch" in message:
            began = True
            rank.epochs[-1].append([known.get(digest, (-1, -1)) for digest in message["batch"]])
        elif "opens" in message:
            opened = message["opens"], message["pid"], message["bytes"], max(len(rank.epochs) - 1, 0), began
            rank.opens.append(opened)
        elif "pid" in message:
            rank.pid = message["pid"]
        elif "bytes_of_state" in message:
            rank.state_bytes = message["bytes_of_state"]
        elif "state" in message:
            rank.ended = True
        rank.error = rank.error or message.get("error", "")
        rank.forbidden = rank.forbidden or message.get("forbidden", "")
    return rank


# ---- what is required of the batches that ranks got


_REST = 2  # shards that a process may share with others: the first and the last one of its part
_HELD = 5  # shards in the memory of a process, or opened before the first batch
_PAIRS = 0.3  # neighbours in a batch that may be neighbours in the file, or were neighbours in another epoch
_SAME = 0.85  # of the samples in the first steps of two epochs
_FIRST = 0.4  # of an epoch: these first steps
_ALL = 0.9  # of the samples that come, these come on all ranks: two orders have fewer in common
_WHEN = ("the first run", "the second run, which resumes", "the third run, which resumes")


def judge(answer: Any, task: Task | None = None) -> str:
    """Why the loader is right; raises `Wrong`. Draws a task, unless one is given."""
    task = task or draw()
    runs = observe(answer, task)
    trained: list[Batches] = []  # of each epoch the batches of all ranks, in the order of the runs
    for number, run in enumerate(runs):
        when = f"{_WHEN[number]} on {counted(task.ranks[number], 'rank')}"
        _ran(run, when)
        _streams(run, when, task)
        if number == 0:
            trained.append(_rest(run, 0, task, f"a whole epoch of {when}", []))
            _works(run, task)
            _mixed(trained[0])
            trained.append(_interrupted(run, 1, task, when, 0, []))
            _reordered(trained, task, run)
        elif number == 1:
            trained[1] += _interrupted(run, 0, task, when, 1, trained[1])
        else:
            trained[1] += _rest(run, 0, task, when, trained[1])
            trained.append(_rest(run, 1, task, f"a whole epoch of {when}", []))
            _reordered(trained, task)
        for rank in run:
            if rank.state_bytes > STATE:
                raise Wrong(
                    f"state: on rank {rank.rank} of {when}, the state takes {rank.state_bytes:,} bytes of JSON,"
                    f" expected at most {STATE:,}: a number per shard is enough, without the samples that were seen"
                )
    state = max(rank.state_bytes for run in runs for rank in run)
    held = max(opened[2] for run in runs for rank in run for opened in rank.opens) / SHARD
    counts = ", then ".join(map(str, task.ranks))
    return (
        f"{task.total:,} samples in {len(task.counts)} shards, each once per epoch on {counts} ranks with"
        f" {task.workers} workers each, interrupted after {task.steps[0]} steps of the second one and after"
        f" {task.steps[1]} more; a process had at most {held:.1f} shards in memory, and the state takes {state} bytes"
    )


def _ran(run: Sequence[Rank], when: str) -> None:
    """Every rank ran to its end and kept to the rules."""
    for rank in run:
        if rank.forbidden:
            raise Wrong(f"rules: the answer on rank {rank.rank} of {when} {rank.forbidden}")
    for rank in run:
        if rank.error:
            raise Wrong(f"the answer must run: rank {rank.rank} of {when} raised {rank.error}")
    for rank in run:
        if not rank.ended:
            batches = sum(map(len, rank.epochs))
            raise Wrong(f"the answer hangs: rank {rank.rank} of {when} got {batches} batches, and then no other one")


def _streams(run: Sequence[Rank], when: str, task: Task) -> None:
    """No process reads far ahead of what it delivers."""
    for rank in run:
        first: dict[int, set[int]] = defaultdict(set)
        for shard, pid, held, _, began in rank.opens:
            if held > (_HELD + 1) * SHARD:  # and the samples that it is about to deliver
                raise Wrong(
                    f"memory: in {when}, a process of rank {rank.rank} has {size(held)} in memory when it opens shard"
                    f" {shard}, as much as {held / SHARD:.1f} shards, expected at most {_HELD}: read a shard when its"
                    " samples are due, and then forget it"
                )
            if not began:
                first[pid].add(shard)
        ahead = max(map(len, first.values()), default=0)
        if ahead > _HELD:
            raise Wrong(
                f"memory: in {when}, a process of rank {rank.rank} opens {ahead} shards before this rank has its first"
                f" batch of {task.batch} samples, expected at most {_HELD}: read a shard when its samples are due"
            )


def _works(run: Sequence[Rank], task: Task) -> None:
    """In the first epoch, all workers of a rank read, the rank does not, and few processes read the same shard."""
    pairs = set()
    for rank in run:
        readers = {pid for _, pid, _, epoch, _ in rank.opens if epoch == 0}
        if rank.pid in readers:
            raise Wrong(
                f"workers: rank {rank.rank} opens shards itself, and its training waits meanwhile; let the"
                f" {task.workers} workers of a DataLoader do it"
            )
        if len(readers) < task.workers:
            raise Wrong(
                f"workers: {len(readers)} of the {task.workers} workers of rank {rank.rank} read shards in the first"
                " epoch; divide what a rank reads among all of them"
            )
        pairs |= {(shard, pid) for shard, pid, _, epoch, _ in rank.opens if epoch == 0}
    shards, processes = len(task.counts), task.ranks[0] * task.workers
    most = shards + _REST * processes
    if len(pairs) > most:
        raise Wrong(
            f"traffic: in the first epoch the {processes} workers of {task.ranks[0]} ranks open {len(pairs)} shards"
            f" in total, expected at most {most} ({shards} shards, and {_REST} more per worker that others open too): a"
            " shard that several workers open is downloaded several times"
        )


def _rest(run: Sequence[Rank], epoch: int, task: Task, when: str, before: Batches) -> Batches:
    """The batches of an epoch that is made to its end, after those of earlier runs."""
    batches = _batches(run, epoch, task, when)
    _once(run, epoch, task, when, before)
    counts = [len(rank.epochs[epoch]) for rank in run]
    if len(set(counts)) > 1:
        least, most = counts.index(min(counts)), counts.index(max(counts))
        raise Wrong(
            f"equal numbers: in {when}, rank {most} has {counts[most]} batches and rank {least} has {counts[least]};"
            f" rank {most} would wait for rank {least} in the all-reduce of step {counts[least]}, without an end"
        )
    seen = {sample for batch in (*before, *batches) for sample in batch}
    every = {(shard, index) for shard, count in enumerate(task.counts) for index in range(count)}
    missing = sorted(every - seen)
    most = len(run) * task.batch - 1
    if len(missing) > most:
        why = "the rest that does not fill a batch on every rank is smaller"
        if before:
            why = (
                "a worker may have read it before the interruption, but no rank got it: what counts is what left the"
                " loader"
            )
        raise Wrong(
            f"missing: in {when}, {len(missing)} of {task.total} samples were on no rank in this epoch, such as"
            f" {_name(missing[0])}, expected at most {most}; {why}"
        )
    return batches


def _interrupted(run: Sequence[Rank], epoch: int, task: Task, when: str, number: int, before: Batches) -> Batches:
    """The batches of an epoch until the interruption."""
    steps = task.steps[number]
    batches = _batches(run, epoch, task, when)
    _once(run, epoch, task, when, before)
    for rank in run:
        if len(rank.epochs[epoch]) < steps:
            raise Wrong(
                f"missing: in {when}, rank {rank.rank} has {len(rank.epochs[epoch])} batches of the epoch that is to be"
                f" interrupted after {steps}; {task.total - sum(map(len, before))} samples of it were left for"
                f" {counted(len(run), 'rank')}"
            )
    return batches


def _batches(run: Sequence[Rank], epoch: int, task: Task, when: str) -> Batches:
    """What all ranks got in an epoch: whole batches of samples that are in the shards."""
    for rank in run:
        for step, batch in enumerate(rank.epochs[epoch]):
            if len(batch) != task.batch:
                raise Wrong(
                    f"batches: in {when}, rank {rank.rank} gets {len(batch)} samples in step {step}, expected"
                    f" {task.batch}; what does not fill a batch on every rank is dropped in this epoch"
                )
            if (-1, -1) in batch:
                raise Wrong(
                    f"batches: in {when}, rank {rank.rank} gets a sample in step {step} that is in no shard: yield rows"
                    " of the files as they are"
                )
    return [batch for rank in run for batch in rank.epochs[epoch]]


def _once(run: Sequence[Rank], epoch: int, task: Task, when: str, before: Batches) -> None:
    """No sample comes twice in an epoch."""
    earlier = {sample for batch in before for sample in batch}
    where: dict[Sample, list[tuple[int, int]]] = defaultdict(list)
    for rank in run:
        for step, batch in enumerate(rank.epochs[epoch]):
            for sample in batch:
                where[sample].append((rank.rank, step))
    twice = {sample: places for sample, places in where.items() if len(places) > 1}
    if twice:
        sample, places = min(twice.items())
        named = ", ".join(f"rank {rank} in step {step}" for rank, step in places[:4])
        raise Wrong(
            f"once: in {when}, {len(twice)} samples come more than once, such as {_name(sample)}: {named}"
            f"{_why_twice(twice, len(twice) / len(where), len(run), task)}"
        )
    again = sorted(earlier & where.keys())
    if again:
        rank, step = where[again[0]][0]
        raise Wrong(
            f"once: {len(again)} samples that were trained on before the interruption come again in {when}, such as"
            f" {_name(again[0])}, on rank {rank} in step {step}; what did each worker of each rank deliver until then?"
        )


def _why_twice(twice: dict[Sample, list[tuple[int, int]]], share: float, ranks: int, task: Task) -> str:
    """The usual reasons, from what is the same; `share` of the samples that came at all came more than once."""
    on_ranks = min(len({rank for rank, _ in places}) for places in twice.values())
    times = min(map(len, twice.values()))
    if times >= ranks * task.workers > 1 and on_ranks == ranks:
        return (
            f"; each of {task.workers} workers on each of {ranks} ranks has a copy of the data set and reads all of it"
        )
    if times == task.workers and on_ranks == 1:
        return f"; each of {task.workers} workers has a copy of the data set and reads all of its rank's samples"
    if on_ranks == ranks > 1 and share > _ALL:
        return "; all ranks get the same samples: what depends on rank and ranks?"
    return "; do all ranks and workers compute the same order of the epoch, from the same seed?"


def _mixed(batches: Batches) -> None:
    """The samples of a batch are no neighbours in their file."""
    pairs = _neighbours(batches)
    ordered = sum(left[0] == right[0] and left[1] + 1 == right[1] for left, right in pairs) / len(pairs)
    if ordered > _PAIRS:
        raise Wrong(
            f"order: {ordered:.0%} of the samples in a batch are followed by the one that follows in the file, expected"
            f" at most {_PAIRS:.0%}: shuffle the samples of a shard, or use a shuffle buffer"
        )


def _reordered(trained: Sequence[Batches], task: Task, run: Sequence[Rank] = ()) -> None:
    """The last epoch has another order than those before. `run` made the first two of them."""
    new = _neighbours(trained[-1])
    for epoch, batches in enumerate(trained[:-1]):
        same = len(new & _neighbours(batches)) / len(new)
        if same > _PAIRS:
            raise Wrong(
                f"order: {same:.0%} of the neighbours in the batches of epoch {len(trained) - 1} were neighbours in"
                f" epoch {epoch}, expected at most {_PAIRS:.0%}: each epoch has another order, also after a"
                " resume"
            )
    if run:
        steps = int(_FIRST * min(len(rank.epochs[0]) for rank in run))
        first, second = (
            {sample for rank in run for batch in rank.epochs[epoch][:steps] for sample in batch} for epoch in (0, 1)
        )
        if len(first & second) > _SAME * len(second):
            raise Wrong(
                f"order: {len(first & second) / len(second):.0%} of the samples in the first {steps} steps are the same"
                f" in the first two epochs, expected at most {_SAME:.0%}: shuffle the order of the shards as well"
            )


def _neighbours(batches: Batches) -> set[tuple[Sample, Sample]]:
    return {pair for batch in batches for pair in pairwise(batch)}


def _name(sample: Sample) -> str:
    shard, index = sample
    return f"sample {index} of shard_{shard:04d}.npy"


def _loader(answer: Any) -> str:
    check_class(answer, "of loaders", ["files", "rank", "ranks", "workers", "batch", "seed"])
    return judge(answer)


EXERCISES = {
    "input_pipeline.workers": Exercise(
        "How many workers hide loading",
        _workers,
        "`math.ceil(load / compute)`: this many workers load a batch every load / workers seconds, which is at most"
        " compute. It is never 0, because without workers loading and computing add up.",
    ),
    "input_pipeline.mend": Exercise(
        "A loader that keeps up",
        _mend,
        "In `load` of slow_input.py pass `num_workers=2` to the DataLoader (loading takes 50 % longer than a step,"
        ' so 2 workers hide it), preferably with `persistent_workers=True`; then `run("slow_input.py",'
        " **HERE).wait()`.",
    ),
    "input_pipeline.loader": Exercise(
        "Resume on another number of ranks",
        _loader,
        solution("input_pipeline", "Loader", "Stream"),
        given="shard_stream.py",
        runs="code",
    ),
}
