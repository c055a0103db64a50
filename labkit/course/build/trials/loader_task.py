"""The task of the exercise about loaders: shards of samples, and three runs on different numbers of ranks. The judge
and the ranks share this module."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

TASK, OBSERVED = "task.json", "observed.json"  # files of an exam: what is drawn, and what was observed
STATE = 1000  # bytes of JSON that a state may have: a number per shard, and not the samples that were seen
SAMPLES, NUMBERS = 32, 256  # of a shard, and of a sample: int64
SHARD = SAMPLES * NUMBERS * 8  # bytes
_SHARDS = (49, 61)  # neither 2, 3 nor 4 ranks get equal numbers of whole shards
_LAST = range(25, SAMPLES)  # samples of the last shard: more than the first run may drop
_BATCHES = (6, 7, 8)
_READERS = ((2, 2), (2, 3), (3, 2))  # ranks of the first run, and workers per rank: few, so that each has many shards
_RANKS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Task:
    """A data set, and three runs on different numbers of ranks. The first makes an epoch and `steps[0]` steps of the
    next one, the second goes on for `steps[1]` steps, the third ends this epoch and makes another one."""

    counts: tuple[int, ...]  # samples by shard
    batch: int
    workers: int
    ranks: tuple[int, int, int]
    steps: tuple[int, int]
    seed: int

    @property
    def total(self) -> int:
        """Samples of the data set."""
        return sum(self.counts)

    def to_json(self, files: Sequence[Path]) -> dict[str, Any]:
        """What the program of the ranks reads."""
        epochs, steps = (1, 0, 2), (*self.steps, 0)
        parts = [dict(zip(("ranks", "epochs", "steps"), part)) for part in zip(self.ranks, epochs, steps)]
        counts = {str(file): count for file, count in zip(files, self.counts)}
        return {"files": counts, "batch": self.batch, "workers": self.workers, "seed": self.seed, "parts": parts}


def draw() -> Task:
    """A task. The runs are interrupted where the workers of a rank have not delivered equal numbers of batches."""
    first, workers = random.choice(_READERS)
    second, third = random.sample([ranks for ranks in _RANKS if ranks != first], 2)
    counts = (*[SAMPLES] * (random.choice(_SHARDS) - 1), random.choice(_LAST))
    batch = random.choice(_BATCHES)
    left, steps = sum(counts), []
    for ranks in (first, second):
        all_steps = left // (ranks * batch)
        middle = range(round(0.45 * all_steps), round(0.6 * all_steps))
        steps.append(random.choice([step for step in middle if step % workers]))
        left -= steps[-1] * ranks * batch
    return Task(counts, batch, workers, (first, second, third), (steps[0], steps[1]), random.getrandbits(31))


def write(task: Task, folder: Path) -> list[Path]:
    """The shard files, whose samples are random numbers."""
    folder.mkdir()
    generator = np.random.default_rng()
    files = [folder / f"shard_{number:04d}.npy" for number in range(len(task.counts))]
    for file, count in zip(files, task.counts):
        np.save(file, generator.integers(2**62, size=(count, NUMBERS)))
    return files


def digests(samples: np.ndarray) -> list[str]:
    """A short name of each sample, from all its numbers; `samples` are int64, (samples, numbers)."""
    return [hashlib.blake2b(np.ascontiguousarray(row).tobytes(), digest_size=6).hexdigest() for row in samples]
