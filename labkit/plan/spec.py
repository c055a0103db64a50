"""Spec: the description of one run, validated once. After this gate, code trusts its input.

A Spec validates itself when it is created. What depends on the machine (number of GPUs, support for bf16, availability
of the data set) is checked by `Spec.on(machine)`, which also fills in the unspecified values. A Spec recorded on
another machine can therefore be loaded on this one.
"""

from __future__ import annotations

import difflib
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from labkit.common.arguments import Number, check_flag, check_path, shown
from labkit.common.units import size
from labkit.plan import checkpoints
from labkit.setup import environment
from labkit.training.faults import FAULTS
from labkit.training.options import Option
from labkit.training.strategies import STRATEGIES, Strategy
from labkit.training.workloads import DATA, WORKLOADS, Data, Workload

if TYPE_CHECKING:
    from labkit.setup.machine import Machine

DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
SCALINGS = ("weak", "strong")
_MANY = 1_000_000_000  # a larger value is almost certainly a typing error


class SpecError(ValueError):
    """An invalid Spec: `field` is the name of the field; the message is one sentence with the value and the fix.

    `extra` is the optional extra of the project whose packages are missing, if that is the reason.
    """

    def __init__(self, field: str, message: str, extra: str | None = None):
        super().__init__(message)
        self.field = field
        self.extra = extra


def _number(default: int | None, minimum: int, maximum: int) -> Any:
    """A numeric field with its bounds, which the command line also uses."""
    return field(default=default, metadata={"bounds": Number(int, minimum, maximum)})


@dataclass(frozen=True)
class Spec:
    """The description of one run.

    Either a `strategy` for a `workload`, or a user's `script` with its `args`; with `as_module`, `script` is the name
    of a module that runs as under `python -m`. `batch_size` is in samples: per rank under weak scaling, global under
    strong scaling. `nproc`, `data`, `batch_size` and `options` default to the values of strategy and workload. `steps`
    is the number of optimizer steps of the run, and may end it within an epoch or extend it over several. `fault` is
    the name of an injected fault, one of `FAULTS`. Every `sample_every`-th step is profiled (0: only one early step). A
    rank that makes no progress for `hang_after` seconds is reported. Raises `SpecError` for an invalid value or
    combination of values.
    """

    strategy: str | None = None
    workload: str | None = None
    nproc: int | None = _number(None, 1, 65_536)
    batch_size: int | None = _number(None, 1, _MANY)
    scaling: str = "weak"
    epochs: int | None = _number(None, 1, 1_000_000)
    steps: int | None = _number(None, 1, _MANY)
    precision: str | None = None
    seed: int = _number(0, 0, 2**63 - 1)
    device: str = "auto"
    data: str | None = None
    data_dir: str | None = None
    samples: int | None = _number(None, 1, _MANY)
    options: Mapping[str, Any] = field(default_factory=dict)
    script: str | None = None
    args: tuple[str, ...] = ()
    tensors: bool = False
    save_every: int | None = _number(None, 1, _MANY)
    resume: str | None = None
    max_restarts: int = _number(0, 0, 1000)
    fault: str | None = None
    sample_every: int = _number(50, 0, _MANY)
    hang_after: int = _number(30, 1, 604_800)
    as_module: bool = False

    def __new__(cls, *given: Any, **named: Any) -> Spec:
        """Rejects unknown field names with a `SpecError`, before the generated `__init__` raises `TypeError`."""
        check_fields(named)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._check_types()
        self._one_of("scaling", self.scaling, SCALINGS)
        if self.precision is not None:
            self._one_of("precision", self.precision, PRECISIONS)
        self._one_of("device", self.device, DEVICES)
        if self.script is not None:
            self._check_script()
        else:
            self._complete_training()
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))
        object.__setattr__(self, "args", tuple(self.args))

    # ---- the rows of the tables

    @property
    def strategy_row(self) -> Strategy:
        """The strategy's row of the table."""
        return STRATEGIES[self.strategy]

    @property
    def workload_row(self) -> Workload:
        """The workload's row of the table."""
        return WORKLOADS[self.workload]

    @property
    def data_row(self) -> Data:
        """The data set's row of the table."""
        return DATA[self.data]

    # ---- the arithmetic of batches and steps

    @property
    def name(self) -> str:
        """The end of the run folder's name: the strategy or script, and the number of ranks, such as `ddp-x2`."""
        stem = self.strategy or self.script.replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".py")
        return f"{stem}-x{self.nproc or 1}"

    @property
    def processes(self) -> int:
        """Processes that torchrun starts: one per device, unless the strategy drives all devices from one process."""
        return self.nproc if self.script is not None else self.strategy_row.processes(self)

    @property
    def train_samples(self) -> int:
        """Samples per epoch, over all ranks."""
        return self.samples or self.data_row.train

    @property
    def data_ranks(self) -> int:
        """Data-parallel ranks: the number of different shards that each step's batch is split into."""
        return self.strategy_row.data_ranks(self)

    @property
    def batch_per_rank(self) -> int:
        """Samples per rank in a full step: the batch, or the rank's whole shard of the data set if that is smaller."""
        return min(self._wanted_per_rank, self._shard)

    @property
    def _wanted_per_rank(self) -> int:
        return self.batch_size if self.scaling == "weak" else self.batch_size // self.data_ranks

    @property
    def _shard(self) -> int:
        """Samples of one rank per epoch, rounded up as `DistributedSampler` does."""
        return math.ceil(self.train_samples / self.data_ranks)

    @property
    def global_batch(self) -> int:
        """The global batch size: samples of a full step, over all ranks."""
        return self.batch_per_rank * self.data_ranks

    @property
    def steps_per_epoch(self) -> int:
        """Steps per epoch: the samples of a rank's shard divided by its batch, rounded up."""
        return math.ceil(self._shard / self.batch_per_rank)

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None for a user's script, because only the script knows."""
        if self.script is not None:
            return None
        return self.steps or self.epochs * self.steps_per_epoch

    @property
    def batch_sentence(self) -> str:
        """The batch in words: `128 per rank × 2 = 256 global · 235 steps per epoch`."""
        return (
            f"{self.batch_per_rank} per rank × {self.data_ranks} = {self.global_batch} global ·"
            f" {self.steps_per_epoch:,} steps per epoch"
        )

    # ---- on a machine

    def on(self, machine: Machine) -> Spec:
        """The same Spec with device and number of ranks resolved for `machine`; `SpecError` if it cannot run there."""
        device = self.device
        if device == "auto":
            device = "cuda" if machine.gpus else "cpu"
        if device == "cuda" and not machine.gpus:
            raise SpecError("device", f"--device cuda is not available: {machine.no_gpu_reason}; use --device cpu")
        nproc = self.nproc or machine.default_nproc(device)
        if device == "cuda" and nproc > len(machine.gpus):
            raise SpecError(
                "nproc",
                f"--nproc {nproc} exceeds the {_count(len(machine.gpus), 'GPU')} of this machine; "
                f"use --nproc {len(machine.gpus)}, or --device cpu for CPU ranks",
            )
        if device == "cpu" and nproc > machine.max_cpu_ranks:
            raise SpecError(
                "nproc",
                f"--nproc {nproc} exceeds the maximum of {machine.max_cpu_ranks} CPU ranks for "
                f"{_count(machine.cores, 'core')}; use --nproc {machine.max_cpu_ranks}",
            )
        settled = replace(self, device=device, nproc=nproc)
        if self.script is None:
            settled = replace(settled, precision=self.precision or _precision(machine, settled))
            settled._check_precision(machine)
            strategy, workload, data = settled.strategy_row, settled.workload_row, settled.data_row
            for name, refusal, extra in (
                ("strategy", _package_missing(strategy) or strategy.unmet(settled, machine), strategy.extra),
                ("options", _compiler_missing(settled), None),
                ("options", _too_many_workers(settled, machine), None),
                ("samples", _too_many_samples(settled, machine), None),
                ("workload", workload.missing(settled), workload.extra),
                ("data", data.missing(settled), data.extra),
            ):
                if refusal:
                    raise SpecError(name, refusal, extra if extra and not environment.has(extra) else None)
            settled = settled.with_checkpoint()
        return settled

    def with_checkpoint(self) -> Spec:
        """The same Spec with `resume` set to one verified checkpoint; `SpecError` if the run cannot resume from it."""
        if self.resume is None:
            return self
        try:
            return replace(self, resume=str(checkpoints.resumable(self)))
        except checkpoints.CheckpointError as error:
            raise SpecError("resume", str(error)) from None

    # ---- to and from JSON

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values, as stored in `spec.json`."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        return plain | {"options": dict(self.options), "args": list(self.args)}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Spec:
        """The Spec of a `spec.json`; fields unknown to this version are ignored."""
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in given.items() if name in known})

    # ---- the checks

    def _check_types(self) -> None:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        self._settle(**check_fields(given))
        for name in ("script", "data_dir", "resume"):
            if given[name] is not None:
                self._settle(**{name: _checked(name, check_path, name, given[name])})
        for name in ("tensors", "as_module"):
            _checked(name, check_flag, name, given[name])
        if not isinstance(self.options, Mapping) or not all(isinstance(name, str) for name in self.options):
            raise SpecError("options", f"options must be a dict such as {{'bucket_mb': 10}}, got {shown(self.options)}")
        args = self.args
        if not isinstance(args, (list, tuple)) or not all(isinstance(one, str) and "\0" not in one for one in args):
            raise SpecError("args", f"args must be a list of strings such as ['--lr', '0.1'], got {shown(args)}")

    def _complete_training(self) -> None:
        if self.args or self.as_module:
            what = f"args={shown(self.args)}" if self.args else "as_module=True"
            raise SpecError(
                "args" if self.args else "as_module",
                f"{what} applies only to your own script; name it with script='train.py'",
            )
        strategy = self._row("strategy", "ddp" if self.strategy is None else self.strategy, STRATEGIES)
        workload = self._row("workload", "cnn" if self.workload is None else self.workload, WORKLOADS)
        data = workload.data[0] if self.data is None else self.data
        self._one_of("data", data, tuple(DATA))
        if data not in workload.data:
            raise SpecError(
                "data", f"{workload.name} cannot train on {data!r}; use --data {' or '.join(workload.data)}"
            )
        if self.epochs is not None and self.steps is not None:
            raise SpecError(
                "steps", f"epochs ({self.epochs}) and steps ({self.steps}) exclude each other; give one of them"
            )
        self._settle(
            strategy=strategy.name,
            workload=workload.name,
            data=data,
            nproc=self.nproc or strategy.default_nproc,
            batch_size=self.batch_size or workload.batch_size,
            epochs=self.epochs if self.epochs or self.steps else 1,
            options=self._check_options(strategy, workload),
        )
        most = self.data_row.most
        if most is not None and self.train_samples > most:
            raise SpecError(
                "samples",
                f"--samples {self.samples} exceeds the {most} training samples of {data}; use --samples {most}",
            )
        limit = strategy.limit(self)
        if limit:
            raise SpecError("strategy", limit)
        if self.fault is not None:
            refusal = self._row("fault", self.fault, FAULTS).limit(self)
            if refusal:
                raise SpecError("fault", refusal)
        if self.nproc is not None:
            self._check_batch()

    def _check_script(self) -> None:
        given = {
            "strategy": self.strategy,
            "workload": self.workload,
            "data": self.data,
            "batch_size": self.batch_size,
            "epochs": self.epochs,
            "steps": self.steps,
            "samples": self.samples,
            "options": self.options or None,
            "save_every": self.save_every,
            "resume": self.resume,
            "fault": self.fault,
            "precision": self.precision,
            "data_dir": self.data_dir,
            "seed": self.seed or None,
            "scaling": self.scaling if self.scaling != "weak" else None,
        }
        for name, value in given.items():
            if value is not None:
                flag = name.replace("_", "-")
                raise SpecError(
                    name,
                    f"{flag} {shown(value)} applies only to a strategy; pass it to the script {self.script} after --",
                )

    def _check_batch(self) -> None:
        ranks = self.data_ranks
        if self.scaling == "strong" and self.batch_size % ranks:
            below = self.batch_size // ranks * ranks
            near = [size for size in (below, below + ranks) if size]
            raise SpecError(
                "batch_size",
                f"a global batch of {self.batch_size} is not divisible by {ranks} ranks; use --batch-size"
                f" {' or '.join(map(str, near))}, or --scaling weak for a batch size per rank",
            )
        if self.train_samples < ranks:
            most = self.data_row.most
            more = "" if most is not None and most < ranks else f"--samples {ranks} or more, or "
            raise SpecError(
                "samples",
                f"{self.train_samples} samples are too few for {ranks} ranks; use {more}at most {self.train_samples}"
                " ranks",
            )
        # A default batch is reduced to the shard silently: every displayed figure shows the reduced batch.
        if self._wanted_per_rank > self._shard and self.batch_size != self.workload_row.batch_size:
            fits = self._shard if self.scaling == "weak" else self._shard * ranks
            raise SpecError(
                "batch_size",
                f"a batch of {self._wanted_per_rank} per rank exceeds the {self._shard} samples that a rank has per"
                f" epoch; use --batch-size {fits}, or more --samples",
            )
        micro_batches = self.options.get("accumulate", 1)
        if micro_batches > self.batch_per_rank:
            raise SpecError(
                "options",
                f"accumulate={micro_batches} splits a batch of {self.batch_per_rank} samples into more micro-batches"
                f" than samples; use accumulate={self.batch_per_rank} or less",
            )

    def _check_options(self, strategy: Strategy, workload: Workload) -> dict[str, Any]:
        for name, reason in strategy.lacks.items():
            if name in self.options:
                raise SpecError("options", f"{strategy.name} has no option {name}: {reason}")
        for name in ("save_every", "resume"):
            if name in strategy.lacks and getattr(self, name) is not None:
                raise SpecError(name, f"{strategy.name} does not support checkpoints: {strategy.lacks[name]}")
        if self.precision in strategy.lacks:
            raise SpecError(
                "precision", f"{strategy.name} does not support {self.precision}: {strategy.lacks[self.precision]}"
            )
        known: dict[str, Option] = {option.name: option for option in strategy.all_options + workload.options}
        settled = {name: option.default for name, option in known.items()}
        for name, value in dict(self.options).items():
            if name not in known:
                names = ", ".join(known) or "there are none"
                raise SpecError(
                    "options", f"{strategy.name} with {workload.name} has no option {name!r}; options: {names}"
                )
            try:
                settled[name] = known[name].parse(value)
            except ValueError as error:
                raise SpecError("options", str(error)) from None
        return settled

    def _check_precision(self, machine: Machine) -> None:
        if self.precision == "fp16" and self.device == "cpu":
            raise SpecError("precision", "--precision fp16 is not supported on CPU ranks; use --precision fp32 or bf16")
        if self.precision == "tf32" and self.device == "cpu":
            raise SpecError(
                "precision", "--precision tf32 is not supported on CPU ranks, only on GPUs; use --precision fp32"
            )
        if self.precision in ("tf32", "bf16") and self.device == "cuda":
            for gpu in machine.gpus[: self.nproc]:
                if gpu.capability < (8, 0):
                    raise SpecError(
                        "precision",
                        f"--precision {self.precision} needs a GPU of compute capability 8.0 or newer, and {gpu.name}"
                        f" has {gpu.capability[0]}.{gpu.capability[1]}; use --precision fp16",
                    )

    def _settle(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @staticmethod
    def _row(name: str, value: str, table: Mapping[str, Any]) -> Any:
        Spec._one_of(name, value, tuple(table))
        return table[value]

    @staticmethod
    def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
        if not isinstance(value, str) or value not in allowed:
            raise SpecError(name, f"{name} must be one of {', '.join(allowed)}, got {shown(value)}")


def bounds_of(name: str) -> Number | None:
    """The bounds of a numeric field; None for a field of another type."""
    return Spec.__dataclass_fields__[name].metadata.get("bounds")


def check_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a Spec by name, each checked separately: unknown names and numbers out of bounds raise `SpecError`."""
    known = Spec.__dataclass_fields__
    checked = {}
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise SpecError(name, f"Spec has no field {shown(name)}{hint}; fields: {', '.join(known)}")
        bounds, is_open = bounds_of(name), value is None and known[name].default is None
        if bounds is not None and not is_open:
            value = _checked(name, bounds.check, "--" + name.replace("_", "-"), value)
        checked[name] = value
    return checked


def _checked(field_name: str, check: Callable[..., Any], *given: Any) -> Any:
    """What `check` returns; its `TypeError` or `ValueError` becomes a `SpecError` of the field."""
    try:
        return check(*given)
    except (TypeError, ValueError) as error:
        raise SpecError(field_name, str(error)) from None


def _compiler_missing(spec: Spec) -> str | None:
    compiler = os.environ.get("CXX", "g++")
    if spec.options.get("compile") and not shutil.which(compiler):
        return (
            f"compile needs a C++ compiler, and {compiler} is not on the PATH; install it (apt install g++), or use"
            " compile=false"
        )
    return None


def _package_missing(strategy: Strategy) -> str | None:
    if strategy.extra is None or environment.has(strategy.extra):
        return None
    package = environment.OPTIONAL[strategy.extra]
    return (
        f"{strategy.name} needs the package {package}, which is not installed; {environment.how_to_add(strategy.extra)}"
    )


def _too_many_workers(spec: Spec, machine: Machine) -> str | None:
    each, ranks = spec.options["workers"], spec.processes
    if each * ranks <= machine.max_workers:
        return None
    return (
        f"workers={each} on {ranks} ranks starts {each * ranks} processes, more than the maximum of"
        f" {machine.max_workers} for {_count(machine.cores, 'core')}; use workers={machine.max_workers // ranks} or"
        " less"
    )


def _too_many_samples(spec: Spec, machine: Machine) -> str | None:
    """Every rank holds the whole data set in memory."""
    each, ranks = spec.data_row.sample_bytes(spec.options), spec.processes
    if spec.train_samples * each * ranks <= machine.memory:
        return None
    fits = machine.memory // (each * ranks)
    return (
        f"{spec.train_samples} samples of {spec.data} need {size(spec.train_samples * each)} on each of {ranks} ranks,"
        f" and this machine has {size(machine.memory)} of memory; use --samples {fits} or less"
    )


def _precision(machine: Machine, spec: Spec) -> str:
    """The default precision: fp16 for GPUs with tensor cores for fp16 but not for bf16, such as a T4; otherwise
    fp32."""
    old = spec.device == "cuda" and any((7, 0) <= gpu.capability < (8, 0) for gpu in machine.gpus[: spec.nproc])
    return "fp16" if old and "fp16" not in spec.strategy_row.lacks else "fp32"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")
