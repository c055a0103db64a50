"""A machine that is not in the table: a row of the table with some figures of its own, read from a small JSON file.

    {"like": "h100x8", "per_node": 4, "between_gb_per_s": 25, "oversubscription": 2}

`like` names the row; every other field replaces one of its figures. Units: 10⁹ bytes per second and direction for what
one GPU sends within a node (`inside_gb_per_s`) and between nodes (`between_gb_per_s`), divided by `oversubscription`;
GiB of memory; 10¹² FLOP/s by precision (`tflops`); `efficiency` is the fraction of them in large matrix products.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit.common.arguments import Number, check_choice, check_path, shown
from labkit.common.text import visible_line
from labkit.prediction.devices import ACCELERATED, DEVICES, Device, Link, Rate

_LIMIT = 1 << 16  # bytes of a file
_FIGURES = {
    "per_node": Number(int, 1, 1 << 16),
    "memory_gib": Number(float, 1, 1 << 20),
    "memory_gb_per_s": Number(float, 1, 1e6),
    "inside_gb_per_s": Number(float, 1e-3, 1e6),
    "between_gb_per_s": Number(float, 1e-3, 1e6),
    "oversubscription": Number(float, 1, 1e3),
    "efficiency": Number(float, 0.01, 1),
}
_PEAK = Number(float, 1e-3, 1e6)


def machine_of(value: Any) -> Device:
    """The machine of a name of the table, or of a file (a path that ends in `.json`). Raises `ValueError`, `TypeError`,
    one sentence."""
    if isinstance(value, os.PathLike) or (isinstance(value, str) and value.endswith(".json")):
        return _of_file(Path(check_path("machine", value)))
    return DEVICES[check_choice("machine", value, ACCELERATED)]


def _of_file(path: Path) -> Device:
    said = _read(path)
    row = DEVICES[check_choice(f"{path}: like", said.get("like"), ACCELERATED)]
    unknown = [name for name in said if name not in (*_FIGURES, "like", "name", "tflops")]
    if unknown:
        raise ValueError(f"{path}: {shown(unknown[0])} is not one of like, name, tflops, {', '.join(_FIGURES)}")
    figures = {name: bounds.check(f"{path}: {name}", said[name]) for name, bounds in _FIGURES.items() if name in said}
    accelerator = row.accelerator
    assert accelerator and row.inside
    peaks = said.get("tflops", {})
    if not isinstance(peaks, Mapping):
        raise ValueError(f'{path}: tflops must be an object such as {{"bf16": 989}}, got {shown(peaks)}')
    flops = {
        **accelerator.flops,
        **{
            check_choice(f"{path}: tflops", name, accelerator.flops): 1e12 * _PEAK.check(f"{path}: tflops {name}", peak)
            for name, peak in peaks.items()
        },
    }
    accelerator = replace(
        accelerator,
        flops=flops,
        memory=round(figures.get("memory_gib", accelerator.memory / (1 << 30)) * (1 << 30)),
        bandwidth=figures.get("memory_gb_per_s", accelerator.bandwidth / 1e9) * 1e9,
        efficiency=figures.get("efficiency", accelerator.efficiency),
        sources={**accelerator.sources, **dict.fromkeys(("flops", "memory", "bandwidth", "efficiency"), str(path))},
    )
    between = row.between
    if "between_gb_per_s" in figures or "oversubscription" in figures:
        network = between or row.inside
        reached = figures.get("between_gb_per_s", network.simple.bandwidth / 1e9)
        between = _faster(network, reached / figures.get("oversubscription", 1.0), path)
    return Device(
        visible_line(str(said.get("name", path.stem))),
        f"{row.title}, changed by {visible_line(path.name)}",
        figures.get("per_node", row.per_node),
        accelerator,
        _faster(row.inside, figures["inside_gb_per_s"], path) if "inside_gb_per_s" in figures else row.inside,
        between,
        row.crowded,
    )


def _faster(link: Link, bandwidth: float, path: Path) -> Link:
    """A link with another bandwidth, in 10⁹ bytes per second, and the same seconds per message."""
    ratio = bandwidth * 1e9 / link.simple.bandwidth
    low = Rate(link.low_latency.hop, link.low_latency.bandwidth * ratio)
    return replace(link, simple=Rate(link.simple.hop, bandwidth * 1e9), low_latency=low, source=str(path))


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.exists() and not path.is_file():  # a pipe would block
            raise ValueError(f"machine {shown(str(path))} must be a file")
        with path.open("rb") as file:
            text = file.read(_LIMIT + 1)
    except OSError as error:
        raise ValueError(f"machine {shown(str(path))} cannot be read: {error.strerror}") from None
    try:
        said = json.loads(text) if len(text) <= _LIMIT else None
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise ValueError(f'machine {shown(str(path))} must be a JSON object such as {{"like": "h100x8"}}')
    return said
