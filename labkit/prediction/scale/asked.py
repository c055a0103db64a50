"""From the arguments of `advise` to a `Training`: checks and defaults. Every refusal is one sentence."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from labkit.common.arguments import Number, check_choice, shown
from labkit.common.units import size
from labkit.prediction.devices import ACCELERATED, DEFAULT_MACHINE, DEVICES, Device
from labkit.prediction.links import communication
from labkit.prediction.scale.advice import MOST_DEVICES
from labkit.prediction.scale.model import ATTENTIONS, Model
from labkit.prediction.scale.shapes import of_config, of_parameters, of_workload
from labkit.prediction.scale.training import Training

WHOLE = {"devices": Number(int, 1, MOST_DEVICES), "sequence": Number(int, 1, 1 << 24)}
_MEMORY = Number(float, 1 << 20, 1 << 50)
_BATCH = Number(int, 1, 1 << 32)
_LONG = 8192  # tokens of the default sequence at most
_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_BINARY = {letter: 1 << 10 * power for power, letter in enumerate("KMGT", start=1)}

# Tokens of a batch by parameters: Brown et al. 2020, table 2.1, and The Llama 3 Herd of Models, 2024, section 3.4.
_BATCHES = ((1e9, 0.5e6), (5e9, 1e6), (50e9, 2e6), (300e9, 3.2e6), (float("inf"), 16e6))


def training(
    params: Any = None,
    *,
    config: Any = None,
    workload: Any = None,
    options: Mapping[str, Any] | None = None,
    devices: Any = None,
    machine: Any = DEFAULT_MACHINE,
    memory: Any = None,
    batch: Any = None,
    sequence: Any = None,
    precision: Any = None,
    attention: Any = ATTENTIONS[0],
) -> Training:
    """The training that the arguments of `labkit.advise` describe. Raises `ValueError`, `TypeError`, `SpecError`."""
    row = DEVICES[check_choice("machine", machine, ACCELERATED)]
    accelerator = row.accelerator
    assert accelerator
    model = _model({"params": params, "config": config, "workload": workload}, options or {})
    if precision is None:
        precision = next(name for name in ("bf16", "fp16") if name in accelerator.flops)
    accelerator.peak(precision)
    number = _devices(row, devices)
    length = min(model.positions, _LONG) if sequence is None else WHOLE["sequence"].check("sequence", sequence)
    if model.learned and length > model.positions:
        raise ValueError(f"sequence must be at most {model.positions}, the positions of {model.title}, got {length}")
    return Training(
        model,
        row,
        accelerator,
        communication(row.name),
        number,
        _default_batch(model, number, length) if batch is None else _batch(batch, length, number),
        length,
        accelerator.memory if memory is None else _memory(memory),
        precision,
        check_choice("attention", attention, ATTENTIONS),
    )


def _model(sources: Mapping[str, Any], options: Mapping[str, Any]) -> Model:
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        raise ValueError(
            "describe the model by one of params (such as 7B), config (a config.json) or workload (such as gpt), got"
            f" {' and '.join(given) or 'none of them'}"
        )
    if options and given != ["workload"]:
        raise ValueError(f"options apply only to a workload, got {given[0]} and options {', '.join(options)}")
    if sources["workload"] is not None:
        return of_workload(sources["workload"], options)
    return of_parameters(sources["params"]) if given == ["params"] else of_config(sources["config"])


def _devices(machine: Device, value: Any) -> int:
    """A whole number of nodes, or fewer devices than one has."""
    if value is None:
        return machine.per_node
    number: int = WHOLE["devices"].check("devices", value)
    if machine.between is None and number > machine.per_node:
        raise ValueError(
            f"devices must be at most {machine.per_node} on {machine.name}, which is one node, got {number}"
        )
    if number > machine.per_node and number % machine.per_node:
        raise ValueError(
            f"devices must be whole nodes, a multiple of {machine.per_node} on {machine.name}, or fewer than one has,"
            f" got {number}"
        )
    return number


def _memory(value: Any) -> int:
    """Bytes, or a text such as `24GB` (10⁹) or `24GiB` (2³⁰)."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT])(i?)B", value.strip()) if isinstance(value, str) else None
    if found:
        value = float(found[1]) * (_BINARY[found[2]] if found[3] else _UNITS[found[2]])
    elif isinstance(value, str):
        raise ValueError(f"memory must be a size such as 24GB or 24GiB, got {shown(value)}")
    count: float = _MEMORY.check("memory (bytes)", value)
    return round(count)


def _batch(value: Any, sequence: int, devices: int) -> int:
    """Samples, from a number of them or a text such as `4M tokens`, which is rounded."""
    if not isinstance(value, str):
        return int(_BATCH.check("batch (samples)", value))
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGBT]?)\s*(tokens?|samples?|)", value.strip(), re.IGNORECASE)
    if not found:
        raise ValueError(f"batch must be a number of samples such as 1024, or such as '4M tokens', got {shown(value)}")
    count = float(found[1]) * _UNITS[found[2].upper()]
    in_tokens = found[3].lower().startswith("token")
    if in_tokens and count < sequence:
        raise ValueError(f"batch must have at least one sample of {sequence} tokens, got {shown(value)}")
    return int(_BATCH.check("batch (samples)", _divisible(count / sequence, devices) if in_tokens else round(count)))


def _default_batch(model: Model, devices: int, sequence: int) -> int:
    """What was published for models of this size, in samples, and at least one sample for each device."""
    tokens = next(tokens for bound, tokens in _BATCHES if model.parameters < bound)
    return _divisible(max(devices, tokens / sequence), devices)


def _divisible(samples: float, devices: int) -> int:
    """The nearest number that many meshes divide: the odd factor of the number of devices times a power of two."""
    odd = devices // (devices & -devices)
    return odd << max(0, round(math.log2(samples / odd)))


def in_words(asked: Training) -> str:
    """The training in one line: model, devices, batch."""
    on = f"{asked.devices:,} × {asked.accelerator.name} ({size(asked.memory)} each)"
    batch = f"{asked.batch:,} × {asked.sequence:,} tokens per step"
    return f"{asked.model.title} on {on}, {batch}, {asked.precision}"
