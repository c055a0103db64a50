"""How long collectives take on this machine, and the FLOP/s of its cores: tables that `labkit doctor --calibrate`
measures, one file for each backend and number of ranks, in the user's cache folder.

A file that is damaged, or that was written on another machine or with another torch, is not used, and one sentence says
why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, zip_longest
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct, to_builtins

from labkit.analysis.metrics import median
from labkit.analysis.theory.collectives import bus_factor
from labkit.common.files import user_cache, write_atomically
from labkit.prediction.collectives import ALGORITHMS, CommunicationModel, Duration
from labkit.record.documents import decoded
from labkit.record.events import parse
from labkit.record.files import read_below
from labkit.setup.machine import Machine

VERSION = 2
CALIBRATE = "labkit doctor --calibrate"
_LIMIT = 1 << 20  # bytes of a file
_IDLE = 1.5  # slowdown up to which the machine counts as idle

_Seconds: TypeAlias = Annotated[float, Meta(ge=1e-9, le=1e6)]
_Name: TypeAlias = Annotated[str, Meta(max_length=200)]


class Point(Struct, frozen=True):
    """`repetitions` of an operation on `size` bytes: the median of their seconds, and the quartiles `low` and `high`.
    Of the ranks, the slowest counts. `after_computing` are the seconds of single calls, in order, before each of which
    every rank `computed` for so many seconds; empty for large sizes and on GPUs. Older tables lack `computed`."""

    size: Annotated[int, Meta(ge=1, le=1 << 60)]
    seconds: _Seconds
    low: _Seconds
    high: _Seconds
    repetitions: Annotated[int, Meta(ge=1, le=1_000_000)]
    after_computing: Annotated[tuple[_Seconds, ...], Meta(max_length=1000)] = ()
    computed: Annotated[tuple[Annotated[float, Meta(ge=0, le=1e3)], ...], Meta(max_length=1000)] = ()

    @property
    def least(self) -> float:
        """Seconds that nothing delays: those of the fastest tenth of the calls after computing, if there are any."""
        late = self.after_computing
        return min(self.seconds, late[len(late) // 10]) if late else self.seconds


class LinkTable(Struct, frozen=True, dict=True, rename={"points": "operations"}):
    """Seconds by operation and size for one number of ranks, as stored in one file. `date` is in ISO 8601, in UTC;
    `points` are in order of their size; `missing` gives the reason for each operation that could not be measured.
    `peaks` are the FLOP/s of matrix products on each of these ranks, on CPUs, by precision; `kernels` are `copies`, the
    bytes per second that a copy reads and writes, `launch`, the seconds of the shortest operation, and `slowdown`, by
    how much a rank computed longer than if nothing but the ranks had used the cores."""

    machine: _Name
    torch: _Name
    backend: _Name
    ranks: Annotated[int, Meta(ge=2, le=65_536)]
    date: _Name
    points: dict[str, Annotated[tuple[Point, ...], Meta(min_length=1, max_length=1000)]]
    missing: dict[str, _Name]
    peaks: dict[str, Annotated[float, Meta(ge=1.0, le=1e18)]] = {}
    kernels: dict[str, Annotated[float, Meta(ge=1e-12, le=1e18)]] = {}
    v: int = VERSION

    def __post_init__(self) -> None:
        for operation, points in self.points.items():
            if any(point.size >= larger.size for point, larger in pairwise(points)):
                raise ValueError(f"operations.{operation} must be in order of size, each size once")

    def seconds(self, operation: str, size: int) -> float:
        """Seconds for `size` bytes if nothing delays the call: interpolated between measured sizes, both on a
        logarithmic scale; the latency below the smallest, and the bandwidth of the largest above it. `LookupError` if
        the operation was not measured.

        A size counts as no slower than any larger one: if it was measured to be, something else used the machine.
        """
        curve = self._curve(operation)
        after = next((index for index, (known, _) in enumerate(curve) if known >= size), len(curve))
        if after == 0:
            return curve[0][1]
        low, fast = curve[after - 1]
        if after == len(curve):
            return fast * size / low
        high, slow = curve[after]
        return float(fast * (slow / fast) ** (math.log(size / low) / math.log(high / low)))

    def delays(self, operation: str, size: int) -> dict[float, tuple[float, ...]]:
        """How much longer than `seconds` calls took, by the seconds that the ranks had computed before, on the three
        measured sizes nearest to `size`; empty if that was not measured. `LookupError` if the operation was not
        measured."""
        self._curve(operation)
        near = sorted(self.points[operation], key=lambda point: abs(math.log(point.size / max(1, size))))[:3]
        found: dict[float, tuple[float, ...]] = {}
        for point in near:
            for seconds, computed in zip_longest(point.after_computing, point.computed, fillvalue=0.0):
                found[computed] = *found.get(computed, ()), max(0.0, seconds - point.least)
        return found

    def latency(self, operation: str) -> float:
        """Seconds of the smallest size."""
        return self._curve(operation)[0][1]

    def bus_bandwidth(self, operation: str) -> float:
        """Bytes per second that each link carries at the largest size, as nccl-tests computes it."""
        size, seconds = self._curve(operation)[-1]
        return bus_factor(operation, self.ranks) * size / seconds

    def _curve(self, operation: str) -> tuple[tuple[int, float], ...]:
        """Sizes, and the seconds that count for them."""
        if operation not in self._curves:
            why = self.missing.get(operation, "it was not measured")
            raise LookupError(f"no time is known for {operation} on {self.ranks} {self.backend} ranks: {why}")
        return self._curves[operation]

    @cached_property
    def _curves(self) -> dict[str, tuple[tuple[int, float], ...]]:
        curves = {}
        for operation, points in self.points.items():
            fastest = [*accumulate((point.least for point in reversed(points)), min)]
            curves[operation] = tuple(zip((point.size for point in points), reversed(fastest)))
        return curves

    @property
    def error(self) -> float:
        """How far a repetition is from its median: half the distance of the quartiles as a share of the median, of the
        median operation and size."""
        return median(
            (point.high - point.low) / 2 / point.seconds for points in self.points.values() for point in points
        )

    @property
    def title(self) -> str:
        """`2 gloo ranks, measured on 2026-11-22`"""
        return f"{self.ranks} {self.backend} ranks, measured on {self.date[:10]}"

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values, as stored."""
        values: dict[str, Any] = to_builtins(self)
        return values

    @classmethod
    def from_json(cls, value: Any) -> LinkTable:
        """The table of a stored value; `ValueError`, one clause, if it is invalid."""
        if isinstance(value, dict) and value.get("v") != VERSION:
            raise ValueError("it was written by another version of labkit")
        table: LinkTable = decoded(value, cls)
        return table


class Measured(CommunicationModel):
    """This machine by its tables. For another number of ranks, the nearest table is scaled by the messages in a row and
    the bytes per link of the algorithm, and the result counts as modelled."""

    def __init__(self, tables: Mapping[int, LinkTable]):
        """`tables` by number of ranks, at least one."""
        self.tables = dict(tables)
        self.error = max(table.error for table in self.tables.values())
        self.title = f"this machine ({'; '.join(table.title for table in self.tables.values())})"

    def _time(self, operation: str, size: int, ranks: int, nodes: int) -> Duration:
        if nodes > 1:
            raise LookupError(f"links between nodes were not measured on this machine, got nodes={nodes}")
        if ranks in self.tables:
            table = self.tables[ranks]
            return Duration(table.seconds(operation, size), "measured", delays=table.delays(operation, size))
        table = min(self.tables.values(), key=lambda candidate: abs(math.log(candidate.ranks / ranks)))
        name, algorithm = next(iter(ALGORITHMS[operation].items()))
        asked, known = algorithm(ranks, 1), algorithm(table.ranks, 1)
        latency = table.latency(operation)
        transfer = max(0.0, table.seconds(operation, size) - latency)
        scaled = latency * asked.near / known.near + transfer * asked.inside / known.inside
        return Duration(scaled, "modelled", name, table.delays(operation, size))


# ---- files


def folder() -> Path:
    """The folder of the tables."""
    return user_cache() / "labkit" / "links"


def store(table: LinkTable) -> Path:
    """Writes a table and returns the path; `OSError` if it cannot be written."""
    folder().mkdir(parents=True, exist_ok=True)
    path = folder() / f"{table.backend}-{table.ranks}.json"
    write_atomically(path, json.dumps(table.to_json(), indent=1))
    return path


@dataclass(frozen=True)
class Stored:
    """The tables of a machine in order of backend and ranks, and one sentence for each file that cannot be used."""

    tables: tuple[LinkTable, ...]
    problems: tuple[str, ...]


def stored(machine: Machine) -> Stored:
    """Reads all tables of the cache folder."""
    tables, problems = [], []
    for path in sorted(folder().glob("*.json")):
        try:
            tables.append(_read(path, machine))
        except (OSError, ValueError) as error:
            problems.append(f"{path} cannot be used: {error}; measure again with {CALIBRATE}")
    return Stored(tuple(sorted(tables, key=lambda table: (table.backend, table.ranks))), tuple(problems))


def _read(path: Path, machine: Machine) -> LinkTable:
    try:
        table = LinkTable.from_json(parse(read_below(path.parent, path, _LIMIT)))
    except UnicodeDecodeError:
        raise ValueError("it is not a text file") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if table.machine != machine.hardware:
        raise ValueError(f"it was measured on another machine ({table.machine})")
    if table.torch != machine.torch_version:
        raise ValueError(f"it was measured with torch {table.torch}, and torch {machine.torch_version} is installed")
    return table


def measured(machine: Machine, backend: str) -> Measured:
    """The tables of a machine for one backend; `LookupError` if there are none, with what is wrong with the files."""
    found = stored(machine)
    tables = {table.ranks: table for table in found.tables if table.backend == backend}
    if not tables:
        none = f"communication over {backend} has not been measured on this machine; measure it with {CALIBRATE}"
        raise LookupError("; ".join((none, *found.problems)) if found.problems else none)
    return Measured(tables)


def summary(found: Stored) -> str:
    """Which tables there are, in words."""
    if not found.tables:
        return "the time of collectives has not been measured; predictions on this machine need it"
    return "; ".join(map(_in_words, found.tables))


def _in_words(table: LinkTable) -> str:
    slowdown = table.kernels.get("slowdown", 1.0)
    busy = f" while the machine was busy (its ranks computed {slowdown:.1f} times as long as alone)"
    return table.title + (busy if slowdown > _IDLE else "")
