"""How long a collective takes: on a named machine by latency and bandwidth of its links, on this one from a measured
table; and when computation hides it.

`communication` gives the model of a machine by its name; `seconds` and `time` of every model have one interface. `size`
is in bytes, as in nccl-tests and as the probe counts traffic: the whole tensor of an all-gather (output),
reduce-scatter (input) or all-to-all (input of a rank); the tensor of a rank for the other operations.

`labkit doctor --calibrate` measures the tables of this machine, which also have the FLOP/s of its cores: one file for
each backend and number of ranks, in the user's cache folder. A file that is damaged, or that was written on another
machine or with another torch, is not used, and one sentence says why.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise, zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct, to_builtins

from labkit.analysis.metrics import median
from labkit.analysis.theory.collectives import bus_factor
from labkit.common.arguments import Number, check_choice
from labkit.common.files import user_cache, write_atomically
from labkit.prediction.devices import (
    ACCELERATED,
    DEFAULT_MACHINE,
    DEVICES,
    HERE,
    Device,
    Link,
    Rate,
    check_fits,
    device,
)
from labkit.record.documents import decoded
from labkit.record.events import parse
from labkit.record.files import read_below
from labkit.setup.machine import Machine

# ---- one interface, and what a collective costs

Source = Literal["measured", "modelled"]

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send")

# operations that cost as much as another one: a receive is the other end of a send, a reduce is a broadcast in reverse
_SAME = {"recv": "send", "reduce": "broadcast"}
_SIZE = Number(int, 0, 1 << 60)
_COUNT = Number(int, 1, 1 << 20)


@dataclass(frozen=True)
class Duration:
    """How long one operation takes: `seconds` if nothing delays it, whether they were measured or modelled, and the
    algorithm (empty if measured). `delays` are further seconds, each as likely as the others, by the seconds that the
    ranks have computed before; empty if unknown."""

    seconds: float
    source: Source
    algorithm: str = ""
    delays: Mapping[float, tuple[float, ...]] = field(default_factory=dict)


class CommunicationModel(ABC):
    """How long an operation takes among some ranks. `title` names the machine for people; `per_node` are the ranks of
    a node, 0 if all are on one; `error` is the share by which times that were measured vary."""

    title: str
    per_node = 0
    error = 0.0

    def time(self, operation: str, size: int, ranks: int, nodes: int = 1) -> Duration:
        """The time of one operation on `size` bytes among `ranks` ranks, spread evenly over `nodes` nodes.

        A message (`send`, `recv`) passes between nodes if `nodes` is 2. Raises `ValueError` for an unknown operation or
        an impossible number, and `LookupError` if this machine has no such links.
        """
        operation = known(operation)
        _SIZE.check("size", size)
        _COUNT.check("ranks", ranks)
        _COUNT.check("nodes", nodes)
        if ranks % nodes:
            raise ValueError(f"ranks must be a multiple of nodes, got {ranks} ranks on {nodes} nodes")
        return Duration(0.0, "modelled") if ranks == 1 else self._time(operation, size, ranks, nodes)

    def seconds(self, operation: str, size: int, ranks: int, nodes: int = 1) -> float:
        """The seconds of `time`."""
        return self.time(operation, size, ranks, nodes).seconds

    @abstractmethod
    def _time(self, operation: str, size: int, ranks: int, nodes: int) -> Duration:
        """`time` with checked arguments and at least two ranks."""


def known(operation: str) -> str:
    """The name in `OPERATIONS` under which an operation is measured and modelled; `ValueError` for an unknown one."""
    return check_choice("operation", _SAME.get(operation, operation), OPERATIONS)


@dataclass(frozen=True)
class Load:
    """What an algorithm costs: messages in a row within (`near`) and between nodes (`far`), and the bytes per byte of
    `size` that the links of one rank carry in one direction (`inside`, `between`)."""

    near: int
    far: int
    inside: float
    between: float


def _ring(rounds: int, factor: Callable[[int], float]) -> Callable[[int, int], Load]:
    """A chunk passes every other rank once per round. The ranks of a node form as many rings as there are ranks, each
    of which enters and leaves the node through another network adapter (NCCL's rails)."""

    def load(ranks: int, nodes: int) -> Load:
        far = rounds * (nodes - 1)
        return Load(rounds * (ranks - 1) - far, far, *_carried(factor(ranks), ranks // nodes, nodes))

    return load


def _carried(traffic: float, local: int, nodes: int) -> tuple[float, float]:
    """The bytes of one rank inside a node of `local` ranks and between nodes, whose adapters its ranks share."""
    return traffic if local > 1 else 0.0, traffic / local if nodes > 1 else 0.0


def _tree(ranks: int, nodes: int) -> Load:
    """NCCL's double binary trees: a chain within each node, a tree between nodes, up and then down; every rank sends
    and receives the whole tensor twice, at 92 % of the bandwidth of a ring (NCCL, src/graph/tuning.cc)."""
    local, depth = ranks // nodes, math.ceil(math.log2(nodes))
    return Load(2 * (local - 1), 2 * depth, *_carried(2.0 / 0.92, local, nodes))


def _direct(ranks: int, nodes: int) -> Load:
    """One message to every other rank."""
    local = ranks // nodes
    return Load(local - 1, ranks - local, (local - 1) / ranks, (ranks - local) / ranks)


def _message(ranks: int, nodes: int) -> Load:
    return Load(1, 0, 1.0, 0.0) if nodes == 1 else Load(0, 1, 0.0, 1.0)


def _by_ring(operation: str, rounds: int = 1) -> Callable[[int, int], Load]:
    return _ring(rounds, lambda ranks: bus_factor(operation, ranks))


# Algorithms by operation. NCCL uses trees for all-reduce only.
ALGORITHMS: dict[str, dict[str, Callable[[int, int], Load]]] = {
    "all_reduce": {"ring": _by_ring("all_reduce", rounds=2), "tree": _tree},
    "all_gather": {"ring": _by_ring("all_gather")},
    "reduce_scatter": {"ring": _by_ring("reduce_scatter")},
    "broadcast": {"ring": _by_ring("broadcast")},
    "all_to_all": {"direct": _direct},
    "send": {"direct": _message},
}


# ---- this machine, as measured

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


# ---- the files of the tables


def tables_folder() -> Path:
    return user_cache() / "labkit" / "links"


def store(table: LinkTable) -> Path:
    """Writes a table and returns the path; `OSError` if it cannot be written."""
    tables_folder().mkdir(parents=True, exist_ok=True)
    path = tables_folder() / f"{table.backend}-{table.ranks}.json"
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
    for path in sorted(tables_folder().glob("*.json")):
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


def tables_in_words(found: Stored) -> str:
    """Which tables there are, in words."""
    if not found.tables:
        return "the time of collectives has not been measured; predictions on this machine need it"
    return "; ".join(map(_in_words, found.tables))


def _in_words(table: LinkTable) -> str:
    slowdown = table.kernels.get("slowdown", 1.0)
    busy = f" while the machine was busy (its ranks computed {slowdown:.1f} times as long as alone)"
    return table.title + (busy if slowdown > _IDLE else "")


# ---- a named machine

# Seconds of a call before the first message, by protocol: NCCL, src/graph/tuning.cc, ncclTunerConstantsDefaults (ring).
_CALL = {"simple": 8.4e-6, "low_latency": 6.6e-6}


class Modelled(CommunicationModel):
    """A machine of the table, by the latency-bandwidth model (Hockney, 1994): a call costs its start, a hop for each
    message in a row, and the time of the busiest link. The fastest algorithm and protocol counts, as NCCL chooses.
    """

    def __init__(self, machine: Device):
        """`ValueError` for a machine whose links are not in the table."""
        if machine.inside is None:
            raise ValueError(f"the links of {machine.title} are measured; use communication({machine.name!r})")
        self.title, self.per_node = machine.title, machine.per_node
        self._machine, self._inside = machine, machine.inside
        self._between = machine.between or machine.inside  # of one node, nothing passes between nodes

    def _time(self, operation: str, size: int, ranks: int, nodes: int) -> Duration:
        times = self.by_algorithm(operation, size, ranks, nodes)
        fastest = min(times, key=lambda name: times[name])
        return Duration(times[fastest], "modelled", fastest)

    def by_algorithm(self, operation: str, size: int, ranks: int, nodes: int) -> dict[str, float]:
        """The seconds of each algorithm of an operation of `OPERATIONS`, with its faster protocol; `LookupError` if
        this machine has no such links."""
        check_fits(self._machine, ranks, nodes)
        return {
            name: min(self._by_protocol(algorithm(ranks, nodes), size))
            for name, algorithm in ALGORITHMS[operation].items()
        }

    def _by_protocol(self, load: Load, size: int) -> Iterator[float]:
        for protocol, call in _CALL.items():
            near, far = _rate(self._inside, protocol), _rate(self._between, protocol)
            busiest = max(load.inside / near.bandwidth, load.between / far.bandwidth)
            yield call + load.near * near.hop + load.far * far.hop + size * busiest


def _rate(link: Link, protocol: str) -> Rate:
    return link.simple if protocol == "simple" else link.low_latency


def time_among(model: CommunicationModel, operation: str, size: float, ranks: Sequence[int]) -> Duration:
    """The time of one collective or message among some ranks of the world, by the nodes that they are on; a barrier
    counts as an all-reduce of its bytes, a gather as an all-gather. If nodes have unequal numbers of the ranks, the
    time is that of the next larger number of nodes that divides them evenly. Raises as `CommunicationModel.time` does.
    """
    known = {"gather": "all_gather", "scatter": "broadcast"}.get(operation, operation)
    nodes = len({rank // model.per_node for rank in ranks}) if model.per_node else 1
    nodes = next(count for count in range(nodes, len(ranks) + 1) if len(ranks) % count == 0)
    known = known if known in (*OPERATIONS, "recv", "reduce") else "all_reduce"
    return model.time(known, round(size), len(ranks), nodes)


def communication(name: str, backend: str = "gloo") -> CommunicationModel:
    """The model of communication of a machine: by its name in `DEVICES`, or `here` for what was measured on this
    machine with a `backend`.

    Raises `ValueError` for an unknown name, and `LookupError` if this machine has not been measured.
    """
    machine = device(name)
    return measured(Machine.here(), backend) if machine.name == HERE else Modelled(machine)


# ---- communication against computation: the tokens per device at which a layout becomes bound by computation
#
# Modelled for the MLP of one layer, forward only, in bf16: two matrices, width × inner and inner × width; backward has
# twice of both. The comparison is that of Austin et al., How to Scale Your Model (2025), chapter "Training"
# (jax-ml.github.io/scaling-book): all communication overlaps with computation, but not with other communication. The
# times are those of the table of machines, so that a ring over whole nodes uses all network adapters of a node.

_WIDE = 2  # bytes of a number in bf16
MOST_TOKENS = 1 << 20  # per device: a layout that is bound by communication there is so with any batch

Ratio = Callable[[int], float]  # from tokens per device to seconds of communication per second of computation


@dataclass(frozen=True)
class Balance:
    """`devices` on whole nodes of a named machine, and an MLP of `width` × `inner`; an expert has `expert` instead of
    `inner`. `ValueError` if a number or the machine is impossible."""

    machine: str = DEFAULT_MACHINE
    devices: int = 64
    width: int = 8192
    inner: int = 28672
    expert: int = 2048

    def __post_init__(self) -> None:
        row = DEVICES[check_choice("machine", self.machine, ACCELERATED)]
        for name in ("devices", "width", "inner", "expert"):
            _COUNT.check(name, getattr(self, name))
        if self.devices % row.per_node or self.devices == row.per_node:
            raise ValueError(f"devices must be two or more nodes of {row.per_node}, got {self.devices}")

    def ratios(self) -> dict[str, Ratio]:
        """By layout, communication per computation as a function of the tokens per device. Tensor parallelism has the
        devices of a node; experts are on one node, or on all."""
        row = DEVICES[self.machine]
        assert row.accelerator is not None
        local, nodes = row.per_node, self.devices // row.per_node
        rate = row.accelerator.peak("bf16") * row.accelerator.efficiency
        seconds = Modelled(row).seconds
        whole = 2 * self.width * self.inner * _WIDE  # bytes of both matrices

        def computed(tokens: int, inner: int) -> float:
            return 4 * tokens * self.width * inner / rate

        def gathered(shards: int, ranks: int) -> float:
            return seconds("all_gather", whole // shards, ranks, nodes)

        def tensor(tokens: int) -> float:
            size = local * tokens * self.width * _WIDE  # the ranks of a group have the same tokens
            return seconds("all_gather", size, local) + seconds("reduce_scatter", size, local)

        def experts(tokens: int, ranks: int, nodes: int) -> float:
            return 2 * seconds("all_to_all", tokens * self.width * _WIDE, ranks, nodes)

        def per_computation(communicated: Callable[[int], float], inner: int) -> Ratio:
            return lambda tokens: communicated(tokens) / computed(tokens, inner)

        return {
            "FSDP": per_computation(lambda tokens: gathered(1, self.devices), self.inner),
            f"TP {local}": per_computation(tensor, self.inner),
            f"FSDP × TP {local}": per_computation(lambda tokens: gathered(local, nodes) + tensor(tokens), self.inner),
            f"EP {local}": per_computation(lambda tokens: experts(tokens, local, 1), self.expert),
            f"EP {self.devices}": per_computation(lambda tokens: experts(tokens, self.devices, nodes), self.expert),
        }

    def thresholds(self) -> dict[str, int | None]:
        """By layout, the fewest tokens per device with which communication takes no longer than computation; None if it
        takes longer with any number."""
        return {name: _least(ratio) for name, ratio in self.ratios().items()}


def _least(ratio: Ratio) -> int | None:
    low, high = 0, MOST_TOKENS
    if ratio(high) > 1:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if ratio(middle) <= 1 else (middle, high)
    return high
