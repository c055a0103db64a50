"""Published runs on real GPUs: rows of a file as trainings with a layout, which `estimate` computes, and what was
measured; the runs that ship with the lab, and which of them are near a layout.

The columns of a file are those of collections of training benchmarks: the shape of the decoder, devices, degrees,
batch, speed in whatever form it was published, and peak memory per GPU. What a column leaves out is completed from the
tables here, by framework, model family or machine. A row that cannot be computed is refused in one sentence. `check`
says how well estimates agree with the rows of a file.

`published.csv.gz` has training runs that others measured and published, failures included, one row each with its
source; `labkit advise --check` reads files of the same form.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import re
import statistics
import zlib
from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy

from labkit.analysis.metrics import median
from labkit.common.arguments import Number, check_type, shown
from labkit.common.units import size
from labkit.prediction.devices import DEVICES, Device
from labkit.prediction.links import communication
from labkit.prediction.scale.layouts import ALONE, FRAMEWORKS, SHARDINGS, Layout, Sharding
from labkit.prediction.scale.model import Model, parameters_in_words
from labkit.prediction.scale.step import Estimate, Training, estimate

# ---- the rows of a file

COLUMNS = (
    *("source", "model", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "gpus", "gpu_type"),
    *("strategy", "tp", "pp", "cp", "dp", "precision", "activation_checkpointing", "micro_batch", "global_batch"),
    *("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_percent", "memory_gib", "step_seconds", "where"),
)
_LIMIT = 64 << 20  # bytes of a file


@dataclass(frozen=True)
class Measured:
    """What a run reached: tokens per second and GPU (None: not published), peak memory per GPU in bytes (None: not
    published), and whether it survived (None: not said)."""

    tokens_per_second_per_gpu: float | None
    memory: float | None
    fits: bool | None


@dataclass(frozen=True, eq=False)  # a row is itself: many have the same figures
class Published:
    """A run as published: `line` of the file, `source`, `title` of the model, exact place (`where`), the training with
    its machine, the layout, and what was measured."""

    line: int
    source: str
    title: str
    where: str
    training: Training
    layout: Layout
    measured: Measured


@dataclass(frozen=True)
class Refused:
    """A row that cannot be computed, and the reason in one sentence."""

    line: int
    source: str
    title: str
    reason: str


def read(path: Path) -> tuple[list[Published], list[Refused]]:
    """All rows of a file; if its name ends in `.gz`, gzip has compressed it. Raises `OSError` if it cannot be read,
    `ValueError` if it is not such a file."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", newline="", encoding="utf-8") as file:
            text = file.read(_LIMIT + 1)
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
    except (csv.Error, UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is not a CSV file: {error}") from None
    if len(text) > _LIMIT:
        raise ValueError(f"{path} must be at most {size(_LIMIT)}")
    found: list[Published] = []
    refused: list[Refused] = []
    missing = [name for name in COLUMNS if not rows or name not in rows[0]]
    if missing:
        raise ValueError(f"{path} has no row with the columns {', '.join(missing)}")
    for line, row in enumerate(rows, start=2):
        row = {name: (row[name] or "").strip() for name in COLUMNS}
        try:
            found.append(of_row(row, line))
        except ValueError as error:
            refused.append(Refused(line, row["source"], row["model"], str(error)))
    return found, refused


def of_row(row: Mapping[str, str], line: int = 0) -> Published:
    """The run of one row, by the names of its columns; `ValueError`, one sentence, if it cannot be computed."""
    for words, reason in _NOT_MODELLED.items():
        if re.search(words, f"{row['strategy']} {row['activation_checkpointing']}", re.IGNORECASE):
            raise ValueError(reason)
    model, machine = _model(row), _machine(row)
    layout, precision, sequence, batch = _layout(row, model, machine)
    assert machine.accelerator
    if precision not in machine.accelerator.flops:
        raise ValueError(f"{machine.accelerator.name} has no peak for {precision}")
    training = Training(
        *(model, machine, machine.accelerator, _links(machine.name), layout.devices, batch, sequence),
        *(machine.accelerator.memory, precision, _attention(row)),
        scaling="rowwise" if "rowwise" in row["precision"].lower() else "tensorwise",
    )
    training = replace(training, model=replace(model, positions=max(model.positions, sequence)))
    return Published(
        line, row["source"], row["model"], row["where"], training, layout, _measured(row, training, layout)
    )


_links = cache(communication)

_NOT_MODELLED = {
    r"(?<!lora )adapters?\b(?! \(lora)|\bprefix|prompt.tuning": "adapters other than LoRA are not modelled",
    r"cpu offload|offload(ed)? (of )?(the )?(optimizer|param)": "offloading of model states to the CPU is not modelled",
    r"not packed": "samples are padded, and how many of the tokens are padding is not said",
    r"\bmoe\b|expert|\bep\b": "mixtures of experts are not modelled",
    r"zero.?(infinity|offload)": "offloading to the CPU is not modelled",
}

# ---- the model

# Families by the beginning of a name: gated MLP, tied embedding, vocabulary if it is not said.
_FAMILIES: tuple[tuple[str, bool, bool, int], ...] = (
    (r"nanotron", True, False, 131_072),
    (r"llama.?3\.2", True, True, 128_256),
    (r"llama.?3", True, False, 128_256),
    (r"(code ?)?llama|mistral|vicuna|tinyllama", True, False, 32_000),
    (r"smollm", True, True, 49_152),
    (r"qwen|gemma", True, True, 152_064),
    (r"olmo", True, False, 50_304),
    (r"mpt", False, True, 50_368),
    (r"bloom", False, True, 250_880),
    (r"pythia|gpt.?neox", False, False, 50_432),
    (r"opt|falcon|phi|stablelm", False, True, 50_272),
    (r"gpt|turing|mt-nlg|megatron|bert", False, True, 51_200),
)
_TIED_BELOW = 10_000  # MLP width of nanotron's models with one matrix for embedding and head (scaling_benchmarks.py)


def _model(row: Mapping[str, str]) -> Model:
    sizes = {name: _whole(row, name) for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")}
    for name in ("layers", "hidden", "heads"):
        if not sizes[name]:
            raise ValueError(f"the shape of the model is not said: {name} is empty")
    layers, width, heads = sizes["layers"] or 1, sizes["hidden"] or 1, sizes["heads"] or 1
    name = row["model"].lower()
    family = next((candidate for candidate in _FAMILIES if re.search(rf"\b(?:{candidate[0]})", name)), None)
    gated, tied, vocabulary = family[1:] if family else (True, False, 32_000)
    hidden = sizes["ffn"] or (4 * width if not gated else 256 * -(-8 * width // 768))
    if "nanotron" in name:
        tied = hidden < _TIED_BELOW
    found = (layers, width, heads, sizes["kv_heads"] or heads, width // heads, hidden, sizes["vocab"] or vocabulary)
    return Model(row["model"], *found, 1 << 24, gated=gated, learned=False, biases=not gated, tied=tied)


def _whole(row: Mapping[str, str], name: str) -> int | None:
    """The number in a cell; None if it is empty."""
    if not row[name]:
        return None
    found = re.fullmatch(r"([0-9][0-9,]*)(?:\.0+)?( ?k)?", row[name], re.IGNORECASE)
    number = int(found[1].replace(",", "")) * (1024 if found[2] else 1) if found else 0
    if number < 1:
        raise ValueError(f"{name} is {row[name]!r}, which is not a positive integer")
    return number


# ---- the machine

# Words in the kind of GPU, words about the network in the row, machine; the first that matches.
_MACHINES: tuple[tuple[str, str, str], ...] = (
    (r"gb200", "", "gb200-nvl72"),
    (r"b200", "", "b200x8"),
    (r"h200", "", "h200x8"),
    (r"h100.*96 ?gb", "", "h100x8-96gb"),
    (r"h100", r"\befa\b", "h100x8-efa"),
    (r"h100", r"llama 3 \(production\)|roce", "h100x8-roce"),
    (r"h[18]00", "", "h100x8"),
    (r"a100.*40 ?gb", r"\befa\b|\baws\b|p4d", "a100x8-efa"),
    (r"a100.*40 ?gb", "", "a100x8-40gb"),
    (r"a100", r"jean.?zay|omni-?path|\bopa\b|bloom", "a100x8-opa"),
    (r"a100", r"roce", "a100x8-roce"),
    (r"a[18]00", "", "a100x8"),
    (r"v100.*32 ?gb|dgx-?2", "", "v100x8-32gb"),
    (r"v100", "", "v100x8"),
    (r"mi300", "", "mi300x8"),
    (r"mi250", "", "mi250x8"),
    (r"a10g?\b", "", "a10gx8"),
    (r"a6000", "", "a6000x8"),
    (r"4090", "", "rtx4090"),
    (r"3090", "", "rtx3090"),
    (r"\bl4\b", "", "l4"),
    (r"\bt4\b", "", "t4x2"),
)


def _machine(row: Mapping[str, str]) -> Device:
    kind = (row["gpu_type"] or row["where"]).lower().replace("_", " ")
    around = " ".join((row["gpu_type"], row["source"], row["where"])).lower()
    for words, network, name in _MACHINES:
        if re.search(words, kind) and re.search(network, around):
            return DEVICES[name]
    raise ValueError(f"the GPU {row['gpu_type']!r} is not in the table of devices")


# ---- the layout

_FRAMEWORKS = (  # words in source or model, framework
    (r"playbook|nanotron", "nanotron"),
    (r"torchtitan", "torchtitan"),
    (r"torchtune.*8-bit", "torchtune-8bit"),
    (r"torchtune.*step in backward", "torchtune-step-in-backward"),
    (r"torchtune", "torchtune"),
    (r"foundry|mosaic", "llm-foundry"),
    (r"fms", "fms-fsdp"),
    (r"litgpt|lit-gpt|lightning", "litgpt"),
    (r"bloom|deepspeed", "deepspeed"),
    (r"llama 3 \(production\)", "llama3"),
    (r"megatron|korthikanti|narayanan", "megatron"),
    (r"nanogpt", "nanogpt"),
    (r"olmo", "olmo"),
)
_SHARDINGS = (  # words in the strategy, row of the table of shardings
    (r"zero.?0", "ddp"),
    (r"zero.?1", "zero1"),
    (r"zero.?2|shard_grad_op", "zero2"),
    (r"hsdp|hybrid", "hsdp"),
    (r"zero.?3|fsdp|full_shard", "fsdp"),
    (r"ddp|\bdp\b", "ddp"),
)
_PRECISIONS = (
    (r"(float|fp)_?8", "fp8"),
    (r"bf16|bfloat16", "bf16"),
    (r"fp16|float16|\b16\b|half", "fp16"),
    (r"tf32", "tf32"),
    (r"32", "fp32"),
)
_RECOMPUTED = ((r"selective|\bsac\b|[0-9]/[0-9]", "selective"), (r"full|true|yes|\bac\b|\bon\b", "full"))


def _recomputed(text: str, usual: str) -> str:
    return _choice(_RECOMPUTED, text, "none") if text else usual


def _choice(table: Sequence[tuple[str, str]], text: str, default: str) -> str:
    return next((value for words, value in table if re.search(words, text.lower())), default)


def _layout(row: Mapping[str, str], model: Model, machine: Device) -> tuple[Layout, str, int, int]:
    """The layout, the precision, tokens of a sample, and samples of a step."""
    words = _strategy(row)
    framework = FRAMEWORKS[_choice(_FRAMEWORKS, f"{row['source']} {row['model']} {words}", "pytorch")]
    sequence = _whole(row, "seq")
    if not sequence:
        raise ValueError("the length of a sequence is not said")
    if not (row["strategy"] or row["tp"] or row["dp"]):
        raise ValueError("no configuration is said, only what it reached")
    degrees = {name: _whole(row, name) or 1 for name in ("tp", "pp", "cp")}
    devices = _whole(row, "gpus")
    data = _whole(row, "dp") or max(1, (devices or 1) // (degrees["tp"] * degrees["pp"] * degrees["cp"]))
    ranks = data * degrees["tp"] * degrees["pp"] * degrees["cp"]
    if devices is not None and devices != ranks:
        raise ValueError(f"the degrees multiply to {ranks} ranks, and there are {devices} GPUs")
    if machine.between is None and ranks > machine.per_node:
        raise ValueError(f"{ranks} GPUs are more than {machine.title} has")
    micro_batch, micro_batches = _micro_batches(row, data, degrees["pp"], sequence)
    interleaved = re.search(r"([0-9]+) interleaved", words)
    chunks = int(interleaved[1]) if interleaved else 2 if "interleaved" in words else framework.chunks
    layout = Layout(
        *_sharding(row, data, data * degrees["cp"], degrees["tp"], machine, framework.sharding),
        tensor=degrees["tp"],
        pipeline=degrees["pp"],
        context=degrees["cp"],
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        recompute=_recomputed(row["activation_checkpointing"], framework.recompute),
        chunks=chunks if degrees["pp"] > 1 else 1,
        compiled="compile" in words,
        asynchronous="async" in words,
        loss="chunked" if "chunked" in words else "whole",
        offload="offload" in words,
        trained="qlora" if re.search("qlora|nf4|4-?bit", words) else "lora" if "lora" in words else "all",
        framework=framework,
    )
    assert machine.accelerator
    usual = next((name for name in ("bf16", "fp16") if name in machine.accelerator.flops), "fp32")
    precision = _choice(_PRECISIONS, row["precision"], usual)
    return layout, precision, sequence, data * micro_batch * micro_batches


_CUMULATIVE = ("compile", "chunked", "activation checkpointing", "step in backward", "offloading", "8-bit", "lora")


def _strategy(row: Mapping[str, str]) -> str:
    """The strategy in small letters; of a table whose rows each add something, with all that was added before."""
    words = row["strategy"].lower()
    if "cumulative" not in row["where"]:
        return words
    added = [number for number, step in enumerate(_CUMULATIVE) if step in words]
    return " + ".join((words, *_CUMULATIVE[: max(added)])) if added else words


def _sharding(
    row: Mapping[str, str], data: int, synced: int, tensor: int, machine: Device, usual: str
) -> tuple[Sharding, int, int]:
    """The sharding, the data-parallel ranks, and the ranks that share the states."""
    if synced == 1:
        return ALONE, data, 1
    found = SHARDINGS[_choice(_SHARDINGS, row["strategy"], usual)]
    shards = min(synced, max(1, machine.per_node // tensor)) if found.across else synced
    return found, data, shards


def _micro_batches(row: Mapping[str, str], data: int, pipeline: int, sequence: int) -> tuple[int, int]:
    """Samples of a micro-batch, and micro-batches per step. A batch of a rank alone (`local batch 32`) is split into as
    many micro-batches as a pipeline has stages (torchtitan's default)."""
    batch = _samples(row["global_batch"], sequence)
    local = re.fullmatch(r"local batch ([0-9]+)", row["micro_batch"])
    if local:
        micro_batch = max(1, int(local[1]) // pipeline)
        return micro_batch, int(local[1]) // micro_batch
    micro_batch = _whole(row, "micro_batch") or 1
    if batch is None:
        accumulation = re.search(r"grad(?:ient)?[ _]accumulation(?:[ _]steps)? ([0-9]+)\b(?!\*)", row["where"])
        return micro_batch, int(accumulation[1]) if accumulation else 1
    count = round(batch / (data * micro_batch))
    if count < 1 or abs(count * data * micro_batch / batch - 1) > 0.02:
        raise ValueError(f"a batch of {batch:g} samples is not a multiple of {data} ranks × {micro_batch} samples")
    return micro_batch, count


def _samples(text: str, sequence: int) -> float | None:
    found = re.fullmatch(r"([0-9][0-9,.]*) ?([KM]?)( tokens)?", text)
    if not found:
        return None
    number = float(found[1].replace(",", "")) * {"": 1, "K": 1e3, "M": 1e6}[found[2]]
    if not found[3]:
        return number
    exact = number * (1 << 20) / 1e6 if found[2] == "M" else number  # millions of tokens are powers of two
    return max(1.0, exact // sequence)


def _attention(row: Mapping[str, str]) -> str:
    """Whether the matrices of attention are computed one by one: before FlashAttention came into these frameworks."""
    words = f"{row['source']} {row['model']} {row['where']}".lower()
    return "eager" if re.search(r"korthikanti|narayanan|bloom|2022-12", words) else "fused"


# ---- what was measured


def _measured(row: Mapping[str, str], training: Training, layout: Layout) -> Measured:
    numbers = {name: _number(row[name]) for name in COLUMNS}
    speed = numbers["tokens_per_s_per_gpu"]
    flops = training.model.training_flops(training.sequence)
    if speed is None and numbers["step_seconds"]:
        speed = training.batch * training.sequence / training.devices / numbers["step_seconds"]
    if speed is None and numbers["tflops_per_gpu"]:
        again = layout.recompute == "full" and layout.framework.counts_recomputation
        speed = numbers["tflops_per_gpu"] * 1e12 / flops / (4 / 3 if again else 1)
    if speed is None and numbers["mfu_percent"]:
        speed = numbers["mfu_percent"] / 100 * training.accelerator.peak(training.sixteen) / flops
    memory = numbers["memory_gib"]
    failed = re.search(r"oom|crash", row["memory_gib"], re.IGNORECASE) is not None
    fits = False if failed else True if speed is not None or memory is not None else None
    return Measured(speed, memory * (1 << 30) if memory else None, fits)


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) else None


# ---- the runs that ship with the lab

RUNS = Path(__file__).with_name("published.csv.gz")


@cache
def published() -> tuple[tuple[Published, ...], tuple[Refused, ...]]:
    """The published runs, and the rows that cannot be computed, with the reason."""
    found, refused = read(RUNS)
    return tuple(found), tuple(refused)


@cache
def modelled(run: Published) -> Estimate:
    """What the closed formulas say about the training and layout of a run."""
    return estimate(run.training, run.layout)


def speed(run: Published) -> float | None:
    """Measured tokens per second and GPU; None if the run failed, or if its source has no speed."""
    return run.measured.tokens_per_second_per_gpu


def failed(run: Published) -> bool:
    """Whether the run ran out of memory or crashed."""
    return run.measured.fits is False


# ---- the degrees of a layout, by the names that a learner types

_STAGES = {  # of ZeRO, by what is sharded
    (): 0,
    ("optimizer",): 1,
    ("gradients", "optimizer"): 2,
    ("parameters", "gradients", "optimizer"): 3,
}
DEGREES: Mapping[str, Callable[[Layout], int]] = {
    "dp": lambda layout: layout.data,
    "tp": lambda layout: layout.tensor,
    "pp": lambda layout: layout.pipeline,
    "cp": lambda layout: layout.context,
    "zero": lambda layout: _STAGES[layout.sharding.owners],
    "micro_batch": lambda layout: layout.micro_batch,
}
EXAMPLE = "dp=8,tp=4,pp=2,zero=1,micro_batch=2"
_DEGREE = Number(int, 0, 1 << 20)


def degrees_of(value: Any) -> dict[str, int]:
    """The degrees in a text such as `dp=8,tp=4`, or in a mapping. Raises `ValueError` or `TypeError`, one sentence."""
    if isinstance(value, str):
        pairs = [part.partition("=")[::2] for part in re.split(r"[,\s]+", value.strip()) if part]
    else:
        pairs = list(check_type("layout", value, Mapping, f"a text such as {EXAMPLE!r} or a dict").items())
    found: dict[str, int] = {}
    for name, degree in pairs:
        if name not in DEGREES:
            raise ValueError(f"layout has {', '.join(DEGREES)}, such as {EXAMPLE}; got {shown(name)} in {shown(value)}")
        found[name] = _DEGREE.check(f"{name} of the layout", _DEGREE.from_text(degree))
    if not found:
        raise ValueError(
            f"layout must have at least one of {', '.join(DEGREES)}, such as {EXAMPLE}, got {shown(value)}"
        )
    return found


def matches(layout: Layout, degrees: Mapping[str, int]) -> bool:
    """Whether a layout has these degrees; what they do not name may be anything."""
    return all(DEGREES[name](layout) == degree for name, degree in degrees.items())


# ---- some of the runs

_GPUS = Number(int, 1, 1 << 20)


def select(
    *, model: Any = None, gpus: Any = None, gpu_type: Any = None, layout: Any = None, source: Any = None
) -> tuple[Published, ...]:
    """The published runs of models, GPU types and sources whose names contain a text (`8B`, `H100`, `Playbook`), on
    some number of GPUs or several, with some degrees of the layout. Raises `LookupError` with the values that exist if
    there is none, `ValueError` or `TypeError` for a value that is not possible."""
    found, _ = published()
    for name, text, words in (
        ("model", model, lambda run: run.title),
        ("GPU type", gpu_type, lambda run: f"{run.training.accelerator.name} {run.training.machine.name}"),
        ("source", source, lambda run: run.source),
    ):
        if text is not None:
            if not check_type(name, text, str, "a part of a name"):
                raise ValueError(f"{name} must be a part of a name, got ''")
            found = _narrowed(found, name, text, words, _containing(text, words))
    if gpus is not None:
        several = gpus if isinstance(gpus, (list, tuple, set)) else [gpus]
        numbers = {_GPUS.check("gpus", number) for number in several}
        wanted = ", ".join(map(str, sorted(numbers)))
        found = _narrowed(found, "number of GPUs", wanted, _gpus, lambda run: _gpus(run) in numbers)
    if layout is not None:
        degrees = degrees_of(layout)
        wanted = ",".join(f"{name}={degree}" for name, degree in degrees.items())
        found = _narrowed(
            found, "layout", wanted, lambda run: run.layout.title, lambda run: matches(run.layout, degrees)
        )
    return found


def _gpus(run: Published) -> int:
    return run.training.devices


def _containing(text: str, words: Callable[[Published], str]) -> Callable[[Published], bool]:
    """Whether a name contains the text, in capital letters or not; `3B` is not part of `13B`."""
    pattern = re.compile(r"(?<![0-9.])" * text[:1].isdigit() + re.escape(text), re.IGNORECASE)
    return lambda run: bool(pattern.search(words(run)))


_LISTED = 12  # names in a message


def _narrowed(
    runs: Sequence[Published],
    name: str,
    wanted: str,
    value: Callable[[Published], Any],
    condition: Callable[[Published], bool],
) -> tuple[Published, ...]:
    found = tuple(filter(condition, runs))
    if not found:
        there = sorted({value(run) for run in runs})
        more = f" and {len(there) - _LISTED} more" if len(there) > _LISTED else ""
        listed = ", ".join(map(str, there[:_LISTED]))
        raise LookupError(f"no published run has the {name} {shown(wanted)}; there are {listed}{more}")
    return found


# ---- the runs of one model on some GPUs

Key = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """Published runs of one source that differ in their layout only: the same model, GPUs, batch and sequence.

    A layout that was measured several times counts with the median of its speeds.
    """

    runs: tuple[Published, ...]

    @property
    def training(self) -> Training:
        """The training that all runs have in common."""
        return self.runs[0].training

    @property
    def title(self) -> str:
        """The model, as its source calls it."""
        return self.runs[0].title

    def speed(self, runs: Iterable[Published]) -> float | None:
        """The median of the speeds of runs with the same layout, in tokens per second and GPU; None if none ran."""
        speeds = [reached for reached in map(speed, runs) if reached is not None]
        return median(speeds) if speeds else None

    @property
    def ranked(self) -> tuple[tuple[float, Published], ...]:
        """The layouts that ran, the fastest first, each with its speed and one of its runs."""
        by_layout: dict[Key, list[Published]] = {}
        for run in self.runs:
            by_layout.setdefault(key_of(run.layout), []).append(run)
        known = [(self.speed(runs), runs[0]) for runs in by_layout.values()]
        ran = [(distance, run) for distance, run in known if distance is not None]
        return tuple(sorted(ran, key=lambda ranked: -ranked[0]))

    @property
    def failures(self) -> tuple[Published, ...]:
        """The runs that ran out of memory or crashed."""
        return tuple(filter(failed, self.runs))

    def of(self, degrees: Mapping[str, int]) -> tuple[Published, ...]:
        """The runs with these degrees."""
        return tuple(run for run in self.runs if matches(run.layout, degrees))

    def same(self, run: Published) -> tuple[Published, ...]:
        """All runs with the layout of a run."""
        return tuple(other for other in self.runs if key_of(other.layout) == key_of(run.layout))

    def layout(self, degrees: Mapping[str, int]) -> Layout:
        """A layout with all of `DEGREES`, and otherwise as in the runs; `dp` × `micro_batch` must divide the batch."""
        sharding = next(row for row in SHARDINGS.values() if _STAGES[row.owners] == degrees.get("zero", 0))
        return replace(
            self.runs[0].layout,
            sharding=sharding,
            data=degrees["dp"],
            shards=degrees["dp"] * degrees["cp"],
            tensor=degrees["tp"],
            pipeline=degrees["pp"],
            context=degrees["cp"],
            micro_batch=degrees["micro_batch"],
            micro_batches=self.training.batch // (degrees["dp"] * degrees["micro_batch"]),
        )


def key_of(layout: Layout) -> Key:
    """The degrees of a layout: equal for two runs of a case if they have the same layout."""
    return tuple(degree(layout) for degree in DEGREES.values())


def case(model: str, gpus: int, source: str | None = None) -> Case:
    """The runs of a model on a number of GPUs, as `select`; `LookupError` if they are not of one model and batch."""
    runs = select(model=model, gpus=gpus, source=source)
    first = runs[0]
    for run in runs:
        if common(run) != common(first):
            raise LookupError(
                f"model {shown(model)} on {gpus} GPUs is more than one training: {first.title} of {first.source} and"
                f" {run.title} of {run.source}; name the model or the source more precisely"
            )
    return Case(runs)


def common(run: Published) -> Hashable:
    """What the runs of a case have in common, apart from the number of GPUs."""
    return run.source, run.title, run.training.batch, run.training.sequence, run.training.precision


# ---- evidence

NEAR = 3.0  # the distance up to which a run is evidence for a layout
_SCALED: Mapping[str, tuple[float, Callable[[Training, Layout], float]]] = {  # the distance of a factor of two
    "parameters": (1.0, lambda training, layout: training.model.parameters),
    "GPUs": (1.0, lambda training, layout: training.devices),
    "tokens per sample": (1.0, lambda training, layout: training.sequence),
    "TP": (1.0, lambda training, layout: layout.tensor),
    "PP": (1.0, lambda training, layout: layout.pipeline),
    "CP": (1.0, lambda training, layout: layout.context),
    "samples per micro-batch": (1.0, lambda training, layout: layout.micro_batch),
    "micro-batches": (0.5, lambda training, layout: layout.micro_batches),
}
_NAMED: Mapping[str, tuple[float, Callable[[Training, Layout], Any]]] = {  # the distance of two different values
    "accelerator": (2.0, lambda training, layout: training.accelerator.name),
    "network": (0.5, lambda training, layout: _network(training)),
    "precision": (1.0, lambda training, layout: training.precision),
    "attention": (1.0, lambda training, layout: training.attention),
    "recomputation": (1.0, lambda training, layout: layout.recompute),
}


def _network(training: Training) -> str | None:
    """The link between the nodes of a training; None on one node."""
    link = training.machine.between
    return link.name if link and training.devices > training.machine.per_node else None


_SAME = 0.15  # of a distance: a difference that is not mentioned
_ROUNDED = 0.005  # distances have two decimals


@dataclass(frozen=True)
class Evidence:
    """A published run near a layout.

    `distance` adds 1 for every factor of two in parameters, GPUs, tokens per sample, degrees and samples per
    micro-batch, and a half for that of the number of micro-batches; 1 for each of parameters, gradients and optimizer
    state that is sharded in only one of the two; 1 for another precision, attention or recomputation, a half for
    another network, and 2 for another accelerator. `differences` says what contributes to it, the largest first: `TP 4
    instead of 2`.
    """

    run: Published
    distance: float
    differences: tuple[str, ...]

    @property
    def near(self) -> bool:
        """Whether the run is close enough to support or contradict an estimate: at most `NEAR`."""
        return self.distance <= NEAR


def evidence(
    training: Training, layout: Layout, count: int = 3, runs: tuple[Published, ...] | None = None
) -> tuple[Evidence, ...]:
    """The `count` published runs (of `runs`, or of all) that are nearest to a layout of a training, the nearest first;
    of equally near ones first those that have a speed."""
    runs = published()[0] if runs is None else runs
    scaled = numpy.abs(_coordinates(runs) - numpy.array(_coordinate(training, layout))).sum(axis=1)
    nearest: list[tuple[float, bool, int]] = []
    for number in numpy.argsort(scaled, kind="stable").tolist():
        if len(nearest) >= count and scaled[number] > nearest[count - 1][0] + _ROUNDED:
            break  # what has no scale only adds to the distance
        far = sum(distance for distance, _ in _differences(training, layout, runs[number]))
        insort(nearest, (round(far, 2), speed(runs[number]) is None, number))
    return tuple(
        Evidence(runs[number], far, _in_words(_differences(training, layout, runs[number])))
        for far, _, number in nearest[:count]
    )


@cache
def _coordinates(runs: tuple[Published, ...]) -> numpy.ndarray:
    """The place of each run, in distances."""
    return numpy.array([_coordinate(run.training, run.layout) for run in runs])


def _coordinate(training: Training, layout: Layout) -> list[float]:
    return [weight * math.log2(figure(training, layout)) for weight, figure in _SCALED.values()]


Difference = tuple[float, tuple[str, Any, Any]]  # a distance; what differs, its value there, its value here


def _differences(training: Training, layout: Layout, run: Published) -> list[Difference]:
    """What distinguishes a run from a layout of a training."""
    found: list[Difference] = []
    for name, (weight, figure) in _SCALED.items():
        there, here = figure(run.training, run.layout), figure(training, layout)
        if there != here:
            found.append((weight * abs(math.log2(there / here)), (name, there, here)))
    for name, (cost, value) in _NAMED.items():
        other, own = value(run.training, run.layout), value(training, layout)
        if other != own and other is not None and own is not None:
            found.append((cost, (name, other, own)))
    there_sharded, here_sharded = _sharded(run.layout), _sharded(layout)
    if there_sharded != here_sharded:
        titles = run.layout.sharding.title, layout.sharding.title
        found.append((float(len(there_sharded ^ here_sharded)), ("sharding", *titles)))
    return found


def _sharded(layout: Layout) -> frozenset[str]:
    """The states that data-parallel ranks share."""
    return frozenset(layout.sharding.owners if layout.shards > 1 else ())


def _in_words(differences: Sequence[Difference]) -> tuple[str, ...]:
    large = sorted(
        (difference for difference in differences if difference[0] > _SAME), key=lambda difference: -difference[0]
    )
    return tuple(_words(*what) for _, what in large)


def _words(name: str, there: Any, here: Any) -> str:
    """`TP 4 instead of 2`, `128 instead of 64 GPUs`, `ZeRO-1 instead of DDP`."""
    if isinstance(there, str):
        return f"{there} instead of {here}" + (f" {name}" if name in ("attention", "recomputation") else "")
    if name.isupper():
        return f"{name} {there} instead of {here}"
    shown_as = parameters_in_words if name == "parameters" else "{:,}".format
    return f"{shown_as(there)} instead of {shown_as(here)} {name}"


# ---- how well estimates agree with published runs: errors, ranges, what fits, and the order of layouts

FEWEST = 5  # layouts of a model on some GPUs that are ranked
_NINE_TENTHS = 0.9


@dataclass(frozen=True)
class Pair:
    """A published run and its estimate."""

    run: Published
    estimate: Estimate

    @property
    def speed(self) -> float | None:
        """Modelled / measured tokens per second; None if no speed was published."""
        measured = self.run.measured.tokens_per_second_per_gpu
        return self.estimate.tokens_per_second_per_gpu / measured if measured else None

    @property
    def memory(self) -> float | None:
        """Modelled / measured peak memory; None if no memory was published."""
        measured = self.run.measured.memory
        return self.estimate.memory_bytes / measured if measured else None


@dataclass(frozen=True)
class Agreement:
    """The agreement of some rows. None: there is nothing to compare.

    - Errors are |modelled / measured − 1|: the median, and that which nine tenths of the rows do not exceed.
    - `within`: the part of the measured figures in their 80 % range. `fits`: the part of the rows that survived or
      failed as modelled.
    - `order`: Spearman's rank correlation of modelled and measured speed among the layouts of a model on some GPUs, the
      median of all such groups of at least `FEWEST`. `regret`: the measured speed of the layout that is ranked first,
      relative to the best measured one, the median and the worst of these groups.
    """

    name: str
    rows: int
    refused: int
    speed: tuple[float, float] | None
    memory: tuple[float, float] | None
    within_speed: float | None
    within_memory: float | None
    fits: float | None
    groups: int
    order: float | None
    regret: tuple[float, float] | None


@dataclass(frozen=True)
class Checked:
    """All rows of a file: the pairs, the rows that cannot be computed, and the agreement of each source and of some
    parts of all rows."""

    path: Path
    pairs: tuple[Pair, ...]
    refused: tuple[Refused, ...]
    agreements: tuple[Agreement, ...]


_PARTS: dict[str, Callable[[Pair], bool]] = {
    "all": lambda pair: True,
    "one GPU": lambda pair: pair.run.training.devices == 1,
    "2 to 64 GPUs, TP within a node": lambda pair: (
        2 <= pair.run.training.devices <= 64 and pair.run.layout.tensor <= pair.run.training.machine.per_node
    ),
    "2 to 64 GPUs, TP across nodes": lambda pair: (
        pair.run.training.devices <= 64 and pair.run.layout.tensor > pair.run.training.machine.per_node
    ),
    "65 to 256 GPUs": lambda pair: 64 < pair.run.training.devices <= 256,
    "more than 256 GPUs": lambda pair: pair.run.training.devices > 256,
    "up to 256 GPUs": lambda pair: pair.run.training.devices <= 256,
}


def check(path: Path) -> Checked:
    """Compares the rows of a file with their estimates. Raises as `read` does."""
    runs, refused = read(path)
    pairs: list[Pair] = []
    for run in runs:
        try:
            pairs.append(Pair(run, estimate(run.training, run.layout)))
        except LookupError as error:
            refused.append(Refused(run.line, run.source, run.title, str(error)))
    agreements = []
    for source in sorted({run.source for run in runs} | {row.source for row in refused}):
        of_source = [pair for pair in pairs if pair.run.source == source]
        agreements.append(_agreement(source, of_source, sum(row.source == source for row in refused)))
    for name, holds in _PARTS.items():
        of_part = [pair for pair in pairs if holds(pair)]
        agreements.append(_agreement(name, of_part, len(refused) if name == "all" else 0))
    return Checked(path, tuple(pairs), tuple(refused), tuple(agreements))


def _agreement(name: str, pairs: Sequence[Pair], refused: int) -> Agreement:
    """The agreement of some pairs, and the number of rows that could not be computed."""
    groups: dict[tuple[str, str, int], list[Pair]] = {}
    for pair in pairs:
        if pair.speed is not None:
            groups.setdefault((pair.run.source, pair.run.title, pair.run.training.devices), []).append(pair)
    ranked = [group for group in groups.values() if len(group) >= FEWEST]
    orders, regrets = [_order(group) for group in ranked], [_regret(group) for group in ranked]
    said = [pair for pair in pairs if pair.run.measured.fits is not None]
    return Agreement(
        name,
        len(pairs) + refused,
        refused,
        _errors(pair.speed for pair in pairs),
        _errors(pair.memory for pair in pairs),
        _part(
            _inside(pair, "tokens_per_second_per_gpu", pair.run.measured.tokens_per_second_per_gpu) for pair in pairs
        ),
        _part(_inside(pair, "memory_bytes", pair.run.measured.memory) for pair in pairs),
        _part(pair.estimate.fits == pair.run.measured.fits for pair in said),
        len(ranked),
        median(orders) if orders else None,
        (median(regrets), min(regrets)) if regrets else None,
    )


def _errors(ratios: Iterable[float | None]) -> tuple[float, float] | None:
    """The median and the 90th percentile of the errors."""
    errors = sorted(abs(ratio - 1) for ratio in ratios if ratio is not None)
    return (median(errors), errors[math.ceil(_NINE_TENTHS * len(errors)) - 1]) if errors else None


def _inside(pair: Pair, figure: str, measured: float | None) -> bool | None:
    least, most = pair.estimate.ranges[figure]
    return None if measured is None else least <= measured <= most


def _part(answers: Iterable[bool | None]) -> float | None:
    known = [answer for answer in answers if answer is not None]
    return sum(known) / len(known) if known else None


def _order(group: Sequence[Pair]) -> float:
    """Spearman's rank correlation: the correlation of the ranks, equal values having the mean of their ranks."""
    modelled = _ranks([pair.estimate.tokens_per_second_per_gpu for pair in group])
    measured = _ranks([pair.run.measured.tokens_per_second_per_gpu or 0.0 for pair in group])
    try:
        return statistics.correlation(modelled, measured)
    except statistics.StatisticsError:  # all of one are equal
        return 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value from 0; equal values have the mean of their ranks."""
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]


def _regret(group: Sequence[Pair]) -> float:
    """The measured speed of what is modelled as the fastest, relative to the best measured one. Of runs with the same
    layout, the median counts."""
    speeds: dict[object, list[float]] = {}
    for pair in group:
        speeds.setdefault(pair.run.layout, []).append(pair.run.measured.tokens_per_second_per_gpu or 0.0)
    first = max(group, key=lambda pair: pair.estimate.tokens_per_second_per_gpu).run.layout
    return median(speeds[first]) / max(median(repeats) for repeats in speeds.values())
