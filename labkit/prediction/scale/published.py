"""Published runs: rows of a CSV file as trainings with a layout, which `estimate` computes, and what was measured.

The columns are those of collections of training benchmarks: the shape of the decoder, devices, degrees, batch, speed in
whatever form it was published, and peak memory per GPU. A row that cannot be computed is refused in one sentence.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from labkit.prediction.scale.layouts import Layout
from labkit.prediction.scale.training import Training


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
    found: list[Published] = []
    refused: list[Refused] = []
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", newline="", encoding="utf-8") as file:
        for line, row in enumerate(csv.DictReader(file), start=2):
            try:
                found.append(of_row(row, line))
            except ValueError as error:
                refused.append(Refused(line, row["source"], row["model"], str(error)))
    return found, refused


def of_row(row: Mapping[str, str], line: int = 0) -> Published:
    """The run of one row, by the names of its columns; `ValueError`, one sentence, if it cannot be computed."""
    raise ValueError(f"no reader of {row['source']} is known")
