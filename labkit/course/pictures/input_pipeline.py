"""Gantt charts of data loading and computation: what workers hide, and what pinned memory and asynchronous copies do.
All modelled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from labkit.common.units import counted
from labkit.course.pictures.canvas import SCALED, checked
from labkit.figures import as_plotly, colours

if TYPE_CHECKING:
    import plotly.graph_objects as go

AHEAD = 2  # batches that each worker may be loading or have ready: DataLoader's prefetch_factor
_COLOURS = {
    "fetch": colours.PHASES["data"],
    "copy": colours.PHASES["copy"],
    "launch": colours.PHASES["forward"],
    "train": colours.PHASES["backward"],
}
_LANE = 30  # px


class Batch(NamedTuple):
    """When a batch is loaded, by which worker (None: by the training process), and when it is trained on. Times in
    seconds."""

    worker: int | None
    fetch_start: float
    fetch_end: float
    train_start: float
    train_end: float


class _StepTimes(NamedTuple):
    """When the program loads, copies and launches a step, and when the GPU computes it; each as (start, end) in
    seconds."""

    fetch: tuple[float, float]
    copy: tuple[float, float]
    launch: tuple[float, float]
    train: tuple[float, float]


@checked
def schedule(load: float, compute: float, workers: int, batches: int) -> list[Batch]:
    """The timeline of `batches` batches, each of which takes `load` seconds to load and `compute` seconds to train on.

    Without workers, the training process loads a batch when the previous step is over. With workers, worker i mod
    `workers` loads batch i and may be `AHEAD` batches ahead of the training, as in `torch.utils.data.DataLoader`.
    Raises `ValueError` for times or counts out of range.
    """
    done: list[Batch] = []
    free = [0.0] * workers
    now = 0.0
    for number in range(batches):
        if workers:
            mine, before = number % workers, number - AHEAD * workers
            start = max(free[mine], done[before].train_start if before >= 0 else 0.0)
            free[mine] = start + load
        else:
            mine, start = None, now
        train = max(now, start + load)
        now = train + compute
        done.append(Batch(mine, start, start + load, train, now))
    return done


@checked
def workers(load: float = 0.2, compute: float = 0.1, counts: Sequence[int] = (0, 1, 2), batches: int = 6) -> go.Figure:
    """Loading and training for each number of workers, with one lane for the training process and one per worker."""
    lanes, bars, notes = [], [], []
    for count in counts:
        course = schedule(load, compute, count, batches)
        named = counted(count, "worker")
        trains = f"{named}: training"
        lanes += [trains, *(f"{named}: worker {number + 1}" for number in range(count))]
        for number, batch in enumerate(course, 1):
            lane = trains if batch.worker is None else f"{named}: worker {batch.worker + 1}"
            bars.append(("fetch", lane, batch.fetch_start, batch.fetch_end, str(number)))
            bars.append(("train", trains, batch.train_start, batch.train_end, str(number)))
        notes.append((trains, course[-1].train_end, f"{_milliseconds(_later_steps(course))} per step"))
    return _gantt("Loading and training, modelled", "the number on a bar is the batch", lanes, bars, notes)


def _later_steps(course: Sequence[Batch]) -> float:
    """The mean step time in the second half, when the batches that were prefetched at the start are used up."""
    half = len(course) // 2
    if not half:
        return course[-1].train_end
    return (course[-1].train_end - course[half - 1].train_end) / (len(course) - half)


@checked
def copying(fetch: float, launch: float, copy: float, compute: float, steps: int, waits: bool) -> list[_StepTimes]:
    """The timeline of steps on a GPU that runs copies and kernels sequentially; if `waits`, the program waits for each
    copy.

    Kernels can start when the program starts to launch them, and the last one ends no earlier than the launching.
    Raises `ValueError` for times or counts out of range.
    """
    done: list[_StepTimes] = []
    now = free = 0.0
    for _ in range(steps):
        fetched = now + fetch
        copied = max(free, fetched) + copy
        begins = copied if waits else fetched
        now = begins + launch
        starts = max(copied, begins)
        free = max(starts + compute, now)
        done.append(_StepTimes((fetched - fetch, fetched), (copied - copy, copied), (begins, now), (starts, free)))
    return done


@checked
def copies(
    fetch: float = 0.003,
    launch: float = 0.003,
    copy: float = 0.001,
    compute: float = 0.004,
    slower: float = 2.5,
    steps: int = 4,
) -> go.Figure:
    """The program and its GPU with three ways to copy a batch; a copy from pageable memory takes `slower` times as
    long."""
    lanes, bars, notes = [], [], []
    ways = (("pageable", slower * copy, True), ("pinned", copy, True), ("pinned, non_blocking", copy, False))
    for named, takes, waits in ways:
        program, gpu = f"{named}: program", f"{named}: GPU"
        lanes += [program, gpu]
        course = copying(fetch, launch, takes, compute, steps, waits)
        for batch in course:
            bars += [("fetch", program, *batch.fetch, "fetch"), ("launch", program, *batch.launch, "launch")]
            bars += [("copy", gpu, *batch.copy, "copy"), ("train", gpu, *batch.train, "train")]
        end = course[-1].train[1]
        notes.append((gpu, end, f"{_milliseconds(end - course[0].train[1], steps - 1)} per step"))
    return _gantt("Copying batches to the GPU, modelled", "gaps are waiting times", lanes, bars, notes)


def _milliseconds(seconds: float, steps: int = 1) -> str:
    return f"{1e3 * seconds / max(steps, 1):.3g} ms"


def _gantt(
    title: str,
    note: str,
    lanes: Sequence[str],
    bars: Sequence[tuple[str, str, float, float, str]],
    notes: Sequence[tuple[str, float, str]],
) -> go.Figure:
    """A Gantt chart, first lane on top. A bar is (kind, lane, start and end in seconds, text); a note is (lane, end,
    text)."""
    data: list[dict[str, Any]] = []
    for what in _COLOURS:
        drawn = [bar for bar in bars if bar[0] == what]
        if drawn:
            data.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": what,
                    "y": [lane for _, lane, *_ in drawn],
                    "base": as_plotly.numbers(1e3 * start for _, _, start, _, _ in drawn),
                    "x": as_plotly.numbers(1e3 * (end - start) for _, _, start, end, _ in drawn),
                    "text": [word for *_, word in drawn],
                    "textposition": "inside",
                    "insidetextanchor": "middle",
                    "textfont": {"color": "#000" if what == "launch" else "#FFF"},
                    "constraintext": "inside",
                    "marker": {"color": _COLOURS[what], "line": {"width": 1, "color": "#FFF"}},
                    "hovertemplate": f"{what} %{{text}}: %{{x:.3g}} ms, from %{{base:.3g}} ms on<extra>%{{y}}</extra>",
                }
            )
    beside = {"xanchor": "left", "showarrow": False, "font": {"size": 11}}
    order = {"type": "category", "categoryarray": list(lanes), "range": [len(lanes) - 0.5, -0.5]}
    layout = {
        "title": {"text": f"<b>{title}</b><span style='font-size:10px'>  {note}</span>", "x": 0, "font": {"size": 13}},
        "xaxis": SCALED | {"title": {"text": "ms"}, "rangemode": "tozero"},
        "yaxis": SCALED | order | {"showgrid": False},
        "annotations": [beside | {"y": lane, "x": 1e3 * end, "text": f" {words}"} for lane, end, words in notes],
        "barmode": "overlay",
        "bargap": 0.25,
        "height": 110 + _LANE * len(lanes),
        "margin": {"l": 30 + 7 * max(map(len, lanes)), "r": 80, "t": 56, "b": 40},
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "bgcolor": "rgba(0,0,0,0)"},
        **as_plotly.plain_look(),
    }
    return as_plotly.as_figure(data, layout)
