"""Spec: what is asked for, checked once. After this gate, code trusts its input.

A Spec checks itself when it is made. What depends on the machine (how many GPUs, whether they know bf16, whether the data
are there) is checked by `Spec.on(machine)`, which also fills in what was left open: so a Spec that was recorded elsewhere can be read here.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from labkit.faults import FAULTS
from labkit.options import Option
from labkit.strategies import STRATEGIES, Strategy
from labkit.workloads import DATA, WORKLOADS, Data, Workload

if TYPE_CHECKING:
    from labkit.machine import Machine

DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
SCALINGS = ("weak", "strong")


class SpecError(ValueError):
    """An invalid Spec: `field` is its field, and the message one sentence with the value and the way out."""

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class Spec:
    """One run, as asked for.

    Either a `strategy` for a `workload`, or a `script` of one's own with its `args`. `batch_size` is per rank under
    weak scaling and for all ranks together under strong scaling. `nproc`, `data`, `batch_size` and `options` that
    are left open take the defaults of strategy and workload; `steps` cuts a run short or stretches it over epochs.
    `fault` is what goes wrong on purpose, one of `FAULTS`. One step in `sample_every` is looked at closely (0: only an
    early one), and a rank that makes no progress for `hang_after` seconds is told of.
    Raises `SpecError` for anything that cannot be meant.
    """

    strategy: str | None = None
    workload: str | None = None
    nproc: int | None = None
    batch_size: int | None = None
    scaling: str = "weak"
    epochs: int | None = None
    steps: int | None = None
    precision: str | None = None
    seed: int = 0
    device: str = "auto"
    data: str | None = None
    data_dir: str | None = None
    samples: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    script: str | None = None
    args: tuple[str, ...] = ()
    tensors: bool = False
    save_every: int | None = None
    resume: str | None = None
    max_restarts: int = 0
    fault: str | None = None
    sample_every: int = 50
    hang_after: int = 30

    def __post_init__(self) -> None:
        self._one_of("scaling", self.scaling, SCALINGS)
        if self.precision is not None:
            self._one_of("precision", self.precision, PRECISIONS)
        self._one_of("device", self.device, DEVICES)
        for name in ("nproc", "batch_size", "epochs", "steps", "samples", "save_every"):
            self._whole(name, getattr(self, name), at_least=1)
        for name in ("seed", "max_restarts", "sample_every"):
            self._whole(name, getattr(self, name), at_least=0)
        self._whole("hang_after", self.hang_after, at_least=1)
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
        """What a run folder is called after: `ddp-x2`, or the script's own name."""
        stem = self.strategy or self.script.replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".py")
        return f"{stem}-x{self.nproc or 1}"

    @property
    def processes(self) -> int:
        """Processes that torchrun starts: one for each device, but where a strategy drives several from one process."""
        return self.nproc if self.script is not None else self.strategy_row.processes(self)

    @property
    def train_samples(self) -> int:
        """Samples of one epoch, over all ranks."""
        return self.samples or self.data_row.train

    @property
    def data_ranks(self) -> int:
        """Different shares that each step's batch is split into."""
        return self.strategy_row.data_ranks(self)

    @property
    def batch_per_rank(self) -> int:
        """Samples that one rank trains on in a full step."""
        return self.batch_size if self.scaling == "weak" else self.batch_size // self.data_ranks

    @property
    def global_batch(self) -> int:
        """Samples that all ranks together train on in a full step."""
        return self.batch_per_rank * self.data_ranks

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch: every rank's share of the samples (rounded up, as `DistributedSampler` does) over its batch."""
        share = math.ceil(self.train_samples / self.data_ranks)
        return math.ceil(share / self.batch_per_rank)

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None for a script of one's own, which alone knows."""
        if self.script is not None:
            return None
        return self.steps or self.epochs * self.steps_per_epoch

    @property
    def batch_sentence(self) -> str:
        """The batch in words: `128 per rank × 2 = 256 in all · 235 steps an epoch`."""
        return f"{self.batch_per_rank} per rank × {self.data_ranks} = {self.global_batch} in all · {self.steps_per_epoch:,} steps an epoch"

    # ---- on a machine

    def on(self, machine: Machine) -> Spec:
        """The same Spec with device and number of processes settled for `machine`; `SpecError` where it cannot run there."""
        device = self.device
        if device == "auto":
            device = "cuda" if machine.gpus else "cpu"
        if device == "cuda" and not machine.gpus:
            raise SpecError("device", f"device cuda was asked for, and {machine.no_gpu_reason}; use --device cpu")
        nproc = self.nproc or machine.default_nproc(device)
        if device == "cuda" and nproc > len(machine.gpus):
            raise SpecError(
                "nproc",
                f"{nproc} ranks were asked for, and this machine has {_count(len(machine.gpus), 'GPU')}; "
                f"use --nproc {len(machine.gpus)}, or --device cpu for CPU ranks",
            )
        if device == "cpu" and nproc > machine.max_cpu_ranks:
            raise SpecError(
                "nproc",
                f"{nproc} CPU ranks were asked for, and {machine.max_cpu_ranks} are the most for "
                f"{_count(machine.cores, 'core')}; use --nproc {machine.max_cpu_ranks}",
            )
        settled = replace(self, device=device, nproc=nproc)
        if self.script is None:
            settled = replace(settled, precision=self.precision or _precision(machine, settled))
            settled._check_precision(machine)
            for name, refusal in (
                ("strategy", settled.strategy_row.unmet(settled, machine)),
                ("options", _compiler_missing(settled)),
                ("workload", settled.workload_row.missing(settled)),
                ("data", settled.data_row.missing(settled)),
                ("resume", _no_checkpoints(settled)),
            ):
                if refusal:
                    raise SpecError(name, refusal)
        return settled

    # ---- to and from JSON

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values, as `spec.json` holds it."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        return plain | {"options": dict(self.options), "args": list(self.args)}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Spec:
        """The Spec of a `spec.json`; fields that this version does not know are passed over."""
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in given.items() if name in known})

    # ---- the checks

    def _complete_training(self) -> None:
        strategy = self._row("strategy", self.strategy or "ddp", STRATEGIES)
        workload = self._row("workload", self.workload or "cnn", WORKLOADS)
        data = self.data or workload.data[0]
        if data not in DATA:
            self._one_of("data", data, tuple(DATA))
        if data not in workload.data:
            raise SpecError("data", f"{workload.name} cannot learn from {data!r}; it learns from {_either(workload.data)}")
        if self.epochs is not None and self.steps is not None:
            raise SpecError("steps", f"both epochs ({self.epochs}) and steps ({self.steps}) were given; give one of them")
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
            raise SpecError("samples", f"{self.samples} samples were asked for, and {data} has {most} to train on; use --samples {most}")
        limit = strategy.limit(self)
        if limit:
            raise SpecError("strategy", limit)
        if self.fault is not None:
            impossible = self._row("fault", self.fault, FAULTS).limit(self)
            if impossible:
                raise SpecError("fault", impossible)
        if self.nproc is not None:
            self._check_batch()

    def _check_script(self) -> None:
        asked = {
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
        }
        for name, value in asked.items():
            if value is not None:
                flag = name.replace("_", "-")
                raise SpecError(name, f"{flag} {value!r} goes with a strategy; the script {self.script} sets its own (pass it after --)")

    def _check_batch(self) -> None:
        ranks = self.data_ranks
        if self.scaling == "strong" and self.batch_size % ranks:
            below = self.batch_size // ranks * ranks
            near = [size for size in (below, below + ranks) if size]
            raise SpecError(
                "batch_size",
                f"a global batch of {self.batch_size} cannot be shared by {ranks} ranks; use {' or '.join(map(str, near))}, "
                "or weak scaling for a batch per rank",
            )
        if self.train_samples < ranks:
            raise SpecError("samples", f"{self.train_samples} samples cannot be shared by {ranks} ranks; use at least {ranks}")

    def _check_options(self, strategy: Strategy, workload: Workload) -> dict[str, Any]:
        for name, reason in strategy.lacks.items():
            if name in self.options:
                raise SpecError("options", f"{strategy.name} has no option {name}: {reason}")
        for name in ("save_every", "resume"):
            if name in strategy.lacks and getattr(self, name) is not None:
                raise SpecError(name, f"{strategy.name} writes no checkpoints: {strategy.lacks[name]}")
        if self.precision in strategy.lacks:
            raise SpecError("precision", f"{strategy.name} does not train in {self.precision}: {strategy.lacks[self.precision]}")
        known: dict[str, Option] = {option.name: option for option in strategy.all_options + workload.options}
        settled = {name: option.default for name, option in known.items()}
        for name, value in dict(self.options).items():
            if name not in known:
                there = _either(tuple(known)) if known else "none"
                raise SpecError("options", f"{strategy.name} with {workload.name} has no option {name!r}; there is {there}")
            try:
                settled[name] = known[name].parse(value)
            except ValueError as error:
                raise SpecError("options", f"option {name} was {value!r}; it takes {error}") from None
        return settled

    def _check_precision(self, machine: Machine) -> None:
        if self.precision == "fp16" and self.device == "cpu":
            raise SpecError("precision", "fp16 was asked for on CPU ranks, which train in fp32 or bf16; use --precision fp32")
        if self.precision == "tf32" and self.device == "cpu":
            raise SpecError("precision", "tf32 was asked for on CPU ranks, and only GPUs have it; use --precision fp32")
        if self.precision in ("tf32", "bf16") and self.device == "cuda":
            for gpu in machine.gpus[: self.nproc]:
                if gpu.capability < (8, 0):
                    raise SpecError(
                        "precision",
                        f"{self.precision} was asked for, and {gpu.name} (capability {gpu.capability[0]}.{gpu.capability[1]}) has none; "
                        "use --precision fp16",
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
        if value not in allowed:
            raise SpecError(name, f"{name} {value!r} is not known; there is {_either(allowed)}")

    @staticmethod
    def _whole(name: str, value: Any, at_least: int) -> None:
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            flag = name.replace("_", "-")
            raise SpecError(name, f"{flag} was {value!r}; it takes a whole number of at least {at_least}")


def _no_checkpoints(spec: Spec) -> str | None:
    if spec.resume is not None and not any(Path(spec.resume).glob("step*")):
        return f"there are no checkpoints in {spec.resume!r}; name a run that was made with --save-every, or the folder of its checkpoints"
    return None


def _compiler_missing(spec: Spec) -> str | None:
    wanted = os.environ.get("CXX", "g++")
    if spec.options.get("compile") and not shutil.which(wanted):
        return f"compile needs a C++ compiler, and {wanted} is not on the PATH; install one (Debian: apt install g++), or leave compile out"
    return None


def _precision(machine: Machine, spec: Spec) -> str:
    """What is right where nothing was said: fp16 for GPUs with tensor cores for it and none for bf16, such as a T4; else fp32."""
    old = spec.device == "cuda" and any((7, 0) <= gpu.capability < (8, 0) for gpu in machine.gpus[: spec.nproc])
    return "fp16" if old and "fp16" not in spec.strategy_row.lacks else "fp32"


def _either(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")
