"""Spec: the description of one run, validated once, and its arithmetic: a rank, a step and a sample are counted here
only. After this gate, code trusts its input.

A Spec validates itself when it is created. What depends on the machine (number of GPUs, support for bf16, availability
of the data set) is checked by `Spec.on(machine)`, which also fills in the unspecified values. A Spec recorded on
another machine can therefore be loaded on this one.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from labkit.common.arguments import Number, check_flag, check_path, shown
from labkit.common.units import counted, size
from labkit.plan import checkpoints
from labkit.setup import environment, preflight
from labkit.setup.limits import ConfigError, in_force
from labkit.setup.preflight import Needs
from labkit.training import strategies, workloads
from labkit.training.faults import FAULTS
from labkit.training.rows import Data, Option, Strategy, Workload
from labkit.training.strategies import BASELINE, STRATEGIES
from labkit.training.workloads import DATA, WORKLOADS
from labkit.training.workloads import DEFAULT as DEFAULT_WORKLOAD

if TYPE_CHECKING:
    from labkit.setup.machine import Gpu, Machine


# ---- what fields declare about themselves: values are checked by it, and command line and panel are built from it

MANY = 1_000_000_000  # a larger value is almost certainly a typing error
STRATEGY, SCRIPT = "a strategy", "your own script"  # the two kinds of runs
WIDGET, DEFAULT = "widget", "default"  # how the panel takes a field: a widget, or only as an argument of `Lab`


class SpecError(ValueError):
    """An invalid Spec: `field` is the name of the field; the message is one sentence with the value and the fix.

    `extra` is the optional extra of the project whose packages are missing, if that is the reason.
    """

    def __init__(self, field: str, message: str, extra: str | None = None):
        super().__init__(message)
        self.field = field
        self.extra = extra


@dataclass(frozen=True)
class About:
    """The metadata of one field of Spec.

    - `help`: what the field is, in a few words; on the command line, its default is part of it.
    - `applies_to`: the kinds of runs on which the field has an effect; on others a value is refused.
    - `flag`: what stands for the value on the command line, the unit if it is a number; empty if no flag has a value.
    - `switch`: whether a flag without a value sets it to True.
    - `panel`: WIDGET, DEFAULT, or empty if the panel does not take the field.
    - `compared`: whether a comparison takes the field, with the same value for all of its runs.
    - `bounds`: the bounds of a number. `choices`: the allowed names. `check`: any other check of a single value, which
      returns it and raises `TypeError` or `ValueError`.
    """

    help: str
    applies_to: tuple[str, ...] = (STRATEGY, SCRIPT)
    flag: str = ""
    switch: bool = False
    panel: str = ""
    compared: bool = True
    bounds: Number | None = None
    choices: Collection[str] = ()
    check: Callable[[str, Any], Any] | None = None

    @property
    def on_command_line(self) -> bool:
        """Whether the field has a flag, with or without a value."""
        return self.switch or bool(self.flag)


def about(of: Field[Any]) -> About:
    metadata: About = of.metadata["about"]
    return metadata


def _declared(default: Any, help: str, **more: Any) -> Any:
    """A field with a default (or a function that makes one) and its metadata, `more` as in `About`."""
    metadata = {"about": About(help, **more)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def default_of(of: Field[Any]) -> Any:
    return of.default if of.default_factory is MISSING else of.default_factory()


def _checked(of: Field[Any], value: Any) -> Any:
    """The value of one field, checked by its metadata alone; `SpecError` if it is invalid."""
    name, known = of.name, about(of)
    if value is None and of.default is None:
        return value
    try:
        if known.bounds is not None:
            return known.bounds.check("--" + name.replace("_", "-"), value)
        if known.choices and (not isinstance(value, str) or value not in known.choices):
            raise ValueError(f"{name} must be one of {', '.join(known.choices)}, got {shown(value)}")
        return value if known.check is None else known.check(name, value)
    except (TypeError, ValueError) as error:
        raise SpecError(name, str(error)) from None


def _options_given(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"{name} must be a dict such as {{'bucket_mb': 10}}, got {shown(value)}")
    return dict(value)


def _arguments_given(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) and "\0" not in item for item in value):
        raise TypeError(f"{name} must be a list of strings such as ['--lr', '0.1'], got {shown(value)}")
    return tuple(value)


# ---- the Spec


DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
SCALINGS = ("weak", "strong")
_TRAINING = {"applies_to": (STRATEGY,), "panel": WIDGET}
_KEPT = {"applies_to": (STRATEGY,), "panel": DEFAULT}


@dataclass(frozen=True)
class Spec:
    """The description of one run.

    Either a `strategy` for a `workload`, or a user's `script` with its `args`; with `as_module`, `script` is the name
    of a module that runs as under `python -m`. `batch_size` is in samples: per rank under weak scaling, global under
    strong scaling. `nproc`, `data`, `batch_size` and `options` default to the values of strategy and workload; fields
    that do not concern a run, or are not settled yet, are None, whatever their type. `steps`
    is the number of optimizer steps of the run, and may end it within an epoch or extend it over several. `fault` is
    the name of an injected fault, one of `FAULTS`. Every `sample_every`-th step is profiled (0: only one early step). A
    rank that makes no progress for `hang_after` seconds is reported. Each field declares which runs it applies to; a
    value without an effect is refused. Raises `SpecError` for an invalid value or combination of values.
    """

    strategy: str = _declared(
        None, "strategy that distributes the training", choices=STRATEGIES, compared=False, **_TRAINING
    )
    workload: str = _declared(
        None,
        f"model to train: {', '.join(WORKLOADS)} (default: {DEFAULT_WORKLOAD.name})",
        flag="W",
        choices=WORKLOADS,
        **_TRAINING,
    )
    nproc: int = _declared(
        None,
        "ranks: one per GPU, or CPU ranks (default: all GPUs, or 2 CPU ranks)",
        flag="RANKS",
        panel=WIDGET,
        bounds=Number(int, 1, 65_536),
    )
    batch_size: int = _declared(
        None,
        "samples per step, per rank (weak scaling) or global (strong scaling) (default: depends on W)",
        flag="SAMPLES",
        bounds=Number(int, 1, MANY),
        **_TRAINING,
    )
    scaling: str = _declared(
        "weak", f"{' or '.join(SCALINGS)} (default: weak)", flag="S", choices=SCALINGS, **_TRAINING
    )
    epochs: int = _declared(None, "epochs (default: 1)", flag="EPOCHS", bounds=Number(int, 1, 1_000_000), **_TRAINING)
    steps: int = _declared(
        None,
        "optimizer steps of the whole run (default: all steps of the epochs)",
        flag="STEPS",
        bounds=Number(int, 1, MANY),
        **_TRAINING,
    )
    precision: str = _declared(
        None, f"{', '.join(PRECISIONS)} (default: fp32; fp16 on a T4)", flag="P", choices=PRECISIONS, **_TRAINING
    )
    seed: int = _declared(
        0,
        "seed of the initial weights and of shuffling (default: 0)",
        flag="SEED",
        bounds=Number(int, 0, 2**63 - 1),
        **_KEPT,
    )
    device: str = _declared("auto", f"{', '.join(DEVICES)} (default: auto)", flag="D", choices=DEVICES, panel=WIDGET)
    data: str = _declared(
        None, f"data set: {', '.join(DATA)} (default: the workload's first)", flag="D", choices=DATA, **_TRAINING
    )
    data_dir: str | None = _declared(
        None,
        "folder of a data set that is read from files, also for downloads (default: data)",
        flag="DIR",
        check=check_path,
        **_KEPT,
    )
    samples: int | None = _declared(
        None,
        "training samples per epoch (default: the whole data set)",
        flag="SAMPLES",
        bounds=Number(int, 1, MANY),
        **_KEPT,
    )
    options: Mapping[str, Any] = _declared(
        dict, "options of the strategy and the workload, by name", check=_options_given, **_TRAINING
    )
    script: str | None = _declared(
        None, "your own script, instead of a strategy", applies_to=(SCRIPT,), compared=False, check=check_path
    )
    args: tuple[str, ...] = _declared(
        (), "arguments of your own script", applies_to=(SCRIPT,), compared=False, check=_arguments_given
    )
    tensors: bool = _declared(
        False, "record gradients and parameters, to compare runs", panel=DEFAULT, check=check_flag
    )
    save_every: int | None = _declared(
        None,
        "write a checkpoint every N steps, from which a restart resumes (default: no checkpoints)",
        flag="N",
        bounds=Number(int, 1, MANY),
        **_KEPT,
    )
    checkpoint_async: bool = _declared(
        False,
        "write checkpoints in a thread of each rank, while training continues",
        applies_to=(STRATEGY,),
        panel=DEFAULT,
        switch=True,
        check=check_flag,
    )
    resume: str | None = _declared(
        None,
        "resume from the newest checkpoint of a run (name or path), or from one checkpoint",
        applies_to=(STRATEGY,),
        flag="RUN|DIR",
        check=check_path,
    )
    max_restarts: int = _declared(
        0,
        "maximum number of restarts by torchrun after a rank has failed (default: 0)",
        flag="N",
        panel=DEFAULT,
        bounds=Number(int, 0, 1000),
    )
    fault: str | None = _declared(
        None, f"inject a fault: {', '.join(FAULTS)} (default: none)", flag="F", choices=FAULTS, **_TRAINING
    )
    sample_every: int = _declared(
        50,
        "profile every Nth step (default: 50; 0: only one early step)",
        flag="N",
        panel=DEFAULT,
        bounds=Number(int, 0, MANY),
    )
    hang_after: int = _declared(
        30,
        "seconds without progress after which a rank is reported as hanging (default: 30)",
        flag="SECONDS",
        panel=DEFAULT,
        bounds=Number(int, 1, 604_800),
    )
    as_module: bool = _declared(
        False,
        "the script is the name of a module, to run as under python -m",
        applies_to=(SCRIPT,),
        compared=False,
        check=check_flag,
    )

    def __new__(cls, *given: Any, **named: Any) -> Spec:
        """Rejects unknown field names with a `SpecError`, before the generated `__init__` raises `TypeError`."""
        _check_names(named)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._settle(**check_fields({own.name: getattr(self, own.name) for own in fields(self)}))
        for name, refusal in without_effect(vars(self)).items():
            raise SpecError(name, refusal)
        if self.script is None:
            self._settle(**_completed(self))
            _check_training(self)
        self._settle(options=MappingProxyType(self.options))

    @property
    def on_one_device(self) -> Spec:
        """The same training by the baseline strategy, with the options that it has: without a fault, which may need
        several ranks, and with checkpoints that it writes itself."""
        known = {option.name for option in BASELINE.all_options + self.workload_row.options}
        options = {name: value for name, value in self.options.items() if name in known}
        return replace(
            self,
            strategy=BASELINE.name,
            nproc=BASELINE.default_nproc or 1,
            options=options,
            fault=None,
            checkpoint_async=False,
        )

    # ---- the rows of the tables

    @property
    def strategy_row(self) -> Strategy:
        return STRATEGIES[self.strategy]

    @property
    def workload_row(self) -> Workload:
        return WORKLOADS[self.workload]

    @property
    def data_row(self) -> Data:
        return DATA[self.data]

    # ---- the arithmetic of batches and steps

    @property
    def name(self) -> str:
        """The end of the run folder's name: the strategy or script, and the number of ranks, such as `ddp-x2`."""
        path = self.script
        stem = path.replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".py") if path else self.strategy
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
        return min(self.wanted_per_rank, self.shard)

    @property
    def wanted_per_rank(self) -> int:
        """Samples per rank and step according to `batch_size`, of which a rank may have fewer."""
        batch = self.batch_size
        return batch if self.scaling == "weak" else batch // self.data_ranks

    @property
    def shard(self) -> int:
        """Samples of one rank per epoch, rounded up as `DistributedSampler` does."""
        return math.ceil(self.train_samples / self.data_ranks)

    @property
    def global_batch(self) -> int:
        """The global batch size: samples of a full step, over all ranks."""
        return self.batch_per_rank * self.data_ranks

    @property
    def steps_per_epoch(self) -> int:
        """Steps per epoch: the samples of a rank's shard divided by its batch, rounded up."""
        return math.ceil(self.shard / self.batch_per_rank)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run; None for a user's script, because only the script knows."""
        if self.script is not None:
            return self.steps
        return self.steps or self.epochs * self.steps_per_epoch

    @property
    def batch_sentence(self) -> str:
        """The batch in words: `128 per rank × 2 = 256 global · 235 steps per epoch`."""
        return (
            f"{self.batch_per_rank} per rank × {self.data_ranks} = {self.global_batch} global ·"
            f" {counted(self.steps_per_epoch, 'step')} per epoch"
        )

    # ---- on a machine

    def on(self, machine: Machine) -> Spec:
        """The same Spec, settled for `machine`, with its data available and its checkpoint verified; `SpecError` if it
        cannot run there. Waits for a disk and a network if the data must be looked for."""
        settled = self.settled(machine)
        check_available(settled)
        return settled.with_checkpoint()

    def settled(self, machine: Machine) -> Spec:
        """The same Spec with device, number of ranks and precision resolved for `machine`, which takes milliseconds;
        `SpecError` if it cannot run there. Whether packages load and files are available is not checked:
        `check_available` does it, which may take long."""
        device = self.device
        if device == "auto":
            device = "cuda" if machine.gpus else "cpu"
        if device == "cuda" and not machine.gpus:
            raise SpecError("device", f"--device cuda is not available: {machine.no_gpu_reason}; use --device cpu")
        nproc = self.nproc or machine.default_nproc(device)
        if device == "cuda" and nproc > len(machine.gpus):
            raise SpecError(
                "nproc",
                f"--nproc {nproc} exceeds the {counted(len(machine.gpus), 'GPU')} of this machine; "
                f"use --nproc {len(machine.gpus)}, or --device cpu for CPU ranks",
            )
        if device == "cpu" and nproc > machine.max_cpu_ranks:
            raise SpecError(
                "nproc",
                f"--nproc {nproc} exceeds the maximum of {machine.max_cpu_ranks} CPU ranks for "
                f"{counted(machine.cores, 'core')}; use --nproc {machine.max_cpu_ranks}",
            )
        _check_limits(nproc, device)
        spec = replace(self, device=device, nproc=nproc)
        if spec.script is not None:
            return spec
        gpus = machine.gpus[:nproc]
        spec = replace(spec, precision=spec.precision or default_precision(spec, gpus))
        refusal = unsupported(spec.precision, device, gpus)
        if refusal:
            raise SpecError("precision", refusal)
        _check_machine(spec, machine)
        return spec

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
        plain = {own.name: getattr(self, own.name) for own in fields(self)}
        return plain | {"options": dict(self.options), "args": list(self.args)}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Spec:
        """The Spec of a `spec.json`. Fields unknown to this version are ignored, and so are values without an effect,
        which earlier versions accepted."""
        known = {own.name: given[own.name] for own in fields(cls) if own.name in given}
        idle = without_effect(check_fields(known))
        return cls(**{name: value for name, value in known.items() if name not in idle})

    def _settle(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


def bounds_of(name: str) -> Number | None:
    """The bounds of a numeric field; None for a field of another type."""
    return about(Spec.__dataclass_fields__[name]).bounds


def check_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a Spec by name, each checked by itself and in its own type: unknown names and invalid values raise
    `SpecError`."""
    _check_names(given)
    return {name: _checked(Spec.__dataclass_fields__[name], value) for name, value in given.items()}


def _check_names(given: Iterable[str]) -> None:
    for name in given:
        if name not in Spec.__dataclass_fields__:
            near = difflib.get_close_matches(name, Spec.__dataclass_fields__, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            known = ", ".join(Spec.__dataclass_fields__)
            raise SpecError(name, f"Spec has no field {shown(name)}{hint}; fields: {known}")


# ---- the checks of a Spec's fields together, and the values that a strategy and a workload complete it with


def without_effect(values: Mapping[str, Any]) -> dict[str, str]:
    """The fields whose value has no effect on a run, by name, each with one sentence: the value and the fix."""
    script, folder = values.get("script"), values.get("data_dir")
    kind = STRATEGY if script is None else SCRIPT
    idle = {}
    for own in fields(Spec):
        value = values.get(own.name, default_of(own))
        if kind not in about(own).applies_to and value != default_of(own):
            idle[own.name] = (
                f"{own.name}={shown(value)} applies only to your own script; name it with script='train.py'"
                if kind == STRATEGY
                else f"{own.name.replace('_', '-')} {shown(value)} applies only to a strategy; pass it to the script"
                f" {script} after --"
            )
    if script is None and folder is not None:
        possible = WORKLOADS[values.get("workload") or workloads.DEFAULT.name].data
        data = values.get("data") or possible[0]
        if DATA[data].needs.files is None:
            others = [name for name in possible if DATA[name].needs.files]
            fix = f", or use --data {' or '.join(others)}" if others else ""
            idle["data_dir"] = (
                f"data-dir {shown(folder)} has no effect, because the data set {data} is not read from files; leave it"
                f" out{fix}"
            )
    return idle


def _completed(spec: Spec) -> dict[str, Any]:
    """The fields that depend on strategy and workload, with their defaults; `SpecError` if they contradict each
    other."""
    strategy = STRATEGIES[spec.strategy or strategies.DEFAULT.name]
    workload = WORKLOADS[spec.workload or workloads.DEFAULT.name]
    data = spec.data or workload.data[0]
    if data not in workload.data:
        raise SpecError("data", f"{workload.name} cannot train on {data!r}; use --data {' or '.join(workload.data)}")
    if spec.epochs is not None and spec.steps is not None:
        raise SpecError(
            "steps", f"epochs ({spec.epochs}) and steps ({spec.steps}) exclude each other; give one of them"
        )
    return {
        "strategy": strategy.name,
        "workload": workload.name,
        "data": data,
        "nproc": spec.nproc or strategy.default_nproc,
        "batch_size": spec.batch_size or workload.batch_size,
        "epochs": spec.epochs if spec.epochs or spec.steps else 1,
        "options": _options(spec, strategy, workload),
    }


def _check_training(spec: Spec) -> None:
    """Raises `SpecError` if a completed Spec of a strategy cannot run on any machine."""
    most = spec.data_row.most
    if most is not None and spec.train_samples > most:
        raise SpecError(
            "samples",
            f"--samples {spec.samples} exceeds the {most} training samples of {spec.data}; use --samples {most}",
        )
    limit = spec.strategy_row.limit(spec)
    if limit:
        raise SpecError("strategy", limit)
    refusal = FAULTS[spec.fault].limit(spec) if spec.fault is not None else None
    if refusal:
        raise SpecError("fault", refusal)
    refusal = checkpoints.asynchronous_limit(spec)
    if refusal:
        raise SpecError("checkpoint_async", refusal)
    if spec.nproc is not None:
        _check_batch(spec)
        _check_warmup(spec)


def _options(spec: Spec, strategy: Strategy, workload: Workload) -> dict[str, Any]:
    """All options of the strategy and the workload, as given or by default."""
    for name, reason in strategy.lacks.items():
        if name in spec.options:
            raise SpecError("options", f"{strategy.name} has no option {name}: {reason}")
    for name in ("save_every", "resume"):
        if name in strategy.lacks and getattr(spec, name) is not None:
            raise SpecError(name, f"{strategy.name} does not support checkpoints: {strategy.lacks[name]}")
    if spec.precision in strategy.lacks:
        raise SpecError(
            "precision", f"{strategy.name} does not support {spec.precision}: {strategy.lacks[spec.precision]}"
        )
    known: dict[str, Option] = {option.name: option for option in strategy.all_options + workload.options}
    settled = {name: option.default for name, option in known.items()}
    for name, value in spec.options.items():
        if name not in known:
            names = ", ".join(known) or "there are none"
            raise SpecError("options", f"{strategy.name} with {workload.name} has no option {name!r}; options: {names}")
        try:
            settled[name] = known[name].parse(value)
        except ValueError as error:
            raise SpecError("options", str(error)) from None
    return settled


def _check_batch(spec: Spec) -> None:
    ranks = spec.data_ranks
    if spec.scaling == "strong" and spec.batch_size % ranks:
        below = spec.batch_size // ranks * ranks
        near = [size for size in (below, below + ranks) if size]
        raise SpecError(
            "batch_size",
            f"a global batch of {spec.batch_size} is not divisible by {ranks} ranks; use --batch-size"
            f" {' or '.join(map(str, near))}, or --scaling weak for a batch size per rank",
        )
    if spec.train_samples < ranks:
        most = spec.data_row.most
        more = "" if most is not None and most < ranks else f"--samples {ranks} or more, or "
        raise SpecError(
            "samples",
            f"{spec.train_samples} samples are too few for {ranks} ranks; use {more}at most {spec.train_samples} ranks",
        )
    # A default batch is reduced to the shard silently: every displayed figure shows the reduced batch.
    if spec.wanted_per_rank > spec.shard and spec.batch_size != spec.workload_row.batch_size:
        fits = spec.shard if spec.scaling == "weak" else spec.shard * ranks
        raise SpecError(
            "batch_size",
            f"a batch of {spec.wanted_per_rank} per rank exceeds the {spec.shard} samples that a rank has per"
            f" epoch; use --batch-size {fits}, or more --samples",
        )
    micro_batches = spec.options.get("accumulate", 1)
    if micro_batches > spec.batch_per_rank:
        raise SpecError(
            "options",
            f"accumulate={micro_batches} splits a batch of {spec.batch_per_rank} samples into more micro-batches"
            f" than samples; use accumulate={spec.batch_per_rank} or less",
        )


def _check_warmup(spec: Spec) -> None:
    warmup_steps = spec.options.get("warmup_steps", 0)
    if warmup_steps >= spec.total_steps:
        raise SpecError(
            "options",
            f"warmup_steps={warmup_steps} leaves no step after the warm-up, because the training has"
            f" {spec.total_steps}; use warmup_steps={spec.total_steps - 1} or less, or more steps",
        )


# ---- on a machine: what it can run

_FOLDER = "data"  # of data sets that are read from files, below the working folder


def _check_limits(nproc: int, device: str) -> None:
    """Raises `SpecError` if this machine or user allows fewer ranks, or if their configuration is invalid."""
    try:
        limits = in_force()
    except ConfigError as error:
        raise SpecError("nproc", str(error)) from None
    if device == "cpu" and nproc > limits.slots:
        raise SpecError(
            "nproc", f"--nproc {nproc} exceeds the {limits.slots} CPU slots of this machine; use --nproc {limits.slots}"
        )
    if limits.ranks is not None and nproc > limits.ranks:
        raise SpecError(
            "nproc",
            f"--nproc {nproc} exceeds the limit of {limits.ranks} ranks ({limits.sources['ranks']}); use --nproc"
            f" {limits.ranks}",
        )


def unsupported(precision: str, device: str, gpus: Sequence[Gpu]) -> str | None:
    """Why a precision does not work on CPU ranks, or on these GPUs; None if it does."""
    if precision == "fp16" and device == "cpu":
        return "--precision fp16 is not supported on CPU ranks; use --precision fp32 or bf16"
    if precision == "tf32" and device == "cpu":
        return "--precision tf32 is not supported on CPU ranks, only on GPUs; use --precision fp32"
    if precision in ("tf32", "bf16") and device == "cuda":
        for gpu in gpus:
            if gpu.capability < (8, 0):
                return (
                    f"--precision {precision} needs a GPU of compute capability 8.0 or newer, and {gpu.name}"
                    f" has {gpu.capability[0]}.{gpu.capability[1]}; use --precision fp16"
                )
    return None


def check_available(spec: Spec) -> None:
    """Raises `SpecError` if a package does not load, or if data are neither on this machine nor can be downloaded.

    It may take seconds if `takes_long` says so; a front end then calls it in a thread.
    """
    for field_name, row_name, needs in _needs(spec):
        refusal = preflight.available(row_name, needs, spec.data_dir or _FOLDER)
        if refusal:
            raise SpecError(field_name, refusal)


def takes_long(spec: Spec) -> bool:
    """Whether `check_available` may take seconds; otherwise there is nothing to look for."""
    return any(preflight.takes_long(needs) for _, _, needs in _needs(spec))


def _needs(spec: Spec) -> Iterator[tuple[str, str, Needs]]:
    if spec.script is None:
        for field_name, row in (
            ("strategy", spec.strategy_row),
            ("workload", spec.workload_row),
            ("data", spec.data_row),
        ):
            yield field_name, row.name, row.needs


def _check_machine(spec: Spec, machine: Machine) -> None:
    missing = {field_name: preflight.installed(name, needs) for field_name, name, needs in _needs(spec)}
    for field_name, refusal in (
        ("strategy", missing["strategy"] or spec.strategy_row.unmet(spec, machine)),
        ("options", _compiler_missing(spec)),
        ("options", _too_many_workers(spec, machine)),
        ("samples", _too_many_samples(spec, machine)),
        ("workload", missing["workload"]),
        ("data", missing["data"]),
    ):
        if refusal:
            extra = next((needs.extra for of, _, needs in _needs(spec) if of == field_name), None)
            raise SpecError(field_name, refusal, extra if extra and not environment.has(extra) else None)


def _compiler_missing(spec: Spec) -> str | None:
    if not spec.options.get("compile"):
        return None
    return preflight.compiler_missing("compile needs a C++ compiler", "compile=false")


def _too_many_workers(spec: Spec, machine: Machine) -> str | None:
    workers, ranks = spec.options["workers"], spec.processes
    if workers * ranks <= machine.max_workers:
        return None
    return (
        f"workers={workers} on {ranks} ranks starts {workers * ranks} processes, more than the maximum of"
        f" {machine.max_workers} for {counted(machine.cores, 'core')}; use workers={machine.max_workers // ranks} or"
        " less"
    )


def _too_many_samples(spec: Spec, machine: Machine) -> str | None:
    """Every rank holds the whole data set in memory."""
    sample_bytes, ranks = spec.data_row.sample_bytes(spec.options), spec.processes
    if spec.train_samples * sample_bytes * ranks <= machine.memory:
        return None
    fits = machine.memory // (sample_bytes * ranks)
    return (
        f"{spec.train_samples} samples of {spec.data} need {size(spec.train_samples * sample_bytes)} on each of {ranks}"
        f" ranks, and this machine has {size(machine.memory)} of memory; use --samples {fits} or less"
    )


def default_precision(spec: Spec, gpus: Sequence[Gpu]) -> str:
    """fp16 for GPUs with tensor cores for fp16 but not for bf16, such as a T4, if the strategy can train in it with
    these options; otherwise fp32."""
    if spec.device != "cuda" or not any((7, 0) <= gpu.capability < (8, 0) for gpu in gpus):
        return "fp32"
    try:
        return replace(spec, precision="fp16").precision
    except SpecError:
        return "fp32"
