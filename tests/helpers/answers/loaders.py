"""Loaders for the exercise of lab 09: other right ones, wrong ones, and cheats; each is the solution with changes."""

from __future__ import annotations

from answers.mutants import mutant

from labkit.course.build.solutions import input_pipeline as loader


def loader_of(*changes):
    """The solution with each (old, new) replaced."""
    return mutant(loader, "Loader", *changes)


STATE = '{"epoch": self.epoch, "done": [*self.done, [self.ranks, self.workers, self.step]]}'
LOADED = 'self.epoch, self.done, self.step = states[0]["epoch"], states[0]["done"], 0'
MINE = "return self.divided(left, self.ranks, self.workers)[self.rank]"
COPIES = "        return [np.array_split(batches, workers) for batches in used]"
WHOLE = (  # each reader gets whole shards
    "ends = np.cumsum([0, *self.files.values()])\n"
    "        parts = []\n"
    "        for worker in range(self.workers):\n"
    "            dealt = range(self.rank * self.workers + worker, len(self.files), self.ranks * self.workers)\n"
    "            mine = np.concatenate([np.arange(ends[shard], ends[shard + 1]) for shard in dealt])\n"
    "            mine = mine[np.isin(mine, left)]\n"
    "            count = len(mine) // self.batch\n"
    "            parts.append(mine[: count * self.batch].reshape(count, self.batch))\n"
)
LEAST = "least = (len(self.files) // (self.ranks * self.workers) * 32 - 32) // self.batch"  # batches that each one has
DEALT = (MINE, WHOLE + "        return parts")
CUT = (MINE, WHOLE + f"        {LEAST}\n        return [part[:least] for part in parts]")

WRONG = {  # changes of the solution, and words of the verdict
    "every worker reads everything": (
        [(MINE, "return [left[: len(left) // self.batch * self.batch].reshape(-1, self.batch)] * self.workers")],
        "once: .*each of . workers on each of . ranks has a copy",
    ),
    "every rank reads everything": (
        [(MINE, "return self.divided(left, 1, self.workers)[0]")],
        "once: .*all ranks get the same samples",
    ),
    "the workers of a rank read the same": (
        [(COPIES, "        return [[batches] * workers for batches in used]")],
        "once: .*each of . workers has a copy",
    ),
    "an order of its own on each rank": (
        [
            ("parts, seed, epoch):", "parts, seed, epoch, rank=0):"),
            ("self.seed, self.epoch)", "self.seed + self.rank, self.epoch)"),
        ],
        "once: .*the same order",
    ),
    "whole shards": ([DEALT], "equal numbers: "),
    "whole shards, and as many batches as the rank with the fewest": ([CUT], "missing: "),
    "a last batch that is smaller": (
        [
            (
                "            yield np.stack(rows)",
                "            yield np.stack(rows)\n"
                "        if get_worker_info().id == 0:\n"
                "            yield np.stack(rows[:1])",
            ),
        ],
        "batches: .*gets 1 samples",
    ),
    "the same order in every epoch": (
        [("default_rng([self.seed, self.epoch", "default_rng([self.seed, 0")],
        "order: .* of the neighbours in the batches of epoch 1 were neighbours in epoch 0",
    ),
    "shards in the same order": (
        [("default_rng([self.seed, self.epoch]).permutation", "default_rng([self.seed]).permutation")],
        "order: .* shuffle the order of the shards",
    ),
    "shards read from front to back": (
        [
            (
                "np.random.default_rng([self.seed, self.epoch, shard]).permutation(len(samples))",
                "np.arange(len(samples))",
            )
        ],
        "order: .* are followed by the one that follows in the file",
    ),
    "the epoch starts again": ([(LOADED, 'self.epoch = states[0]["epoch"]')], "once: .*come again in the second run"),
    "the epoch is skipped": (
        [(LOADED, 'self.epoch = states[0]["epoch"] + 1')],
        "once: .*come again in the second run",
    ),
    "epochs begin at 0 again": (
        [(LOADED, LOADED + "\n        self.seed, self.epoch = self.seed + self.epoch, 0")],
        "once: .*come again in the second run",
    ),
    "only the steps of the last run": (
        [(STATE, '{"epoch": self.epoch, "done": [[self.ranks, self.workers, self.step]]}')],
        "once: .*come again in the third run",
    ),
    "the number of ranks stays": (
        [
            (
                "for ranks, workers, steps in self.done:",
                "for _, workers, steps in self.done:\n            ranks = self.ranks",
            )
        ],
        "(once: .*come again|missing: )",
    ),
    "workers do not deliver in turn": (
        [("(steps - worker + workers - 1) // workers", "steps // workers")],
        "once: .*come again in the second run",
    ),
    "what was prefetched counts": (
        [("[self.ranks, self.workers, self.step]", "[self.ranks, self.workers, self.step + 2 * self.workers]")],
        "missing: .*a worker may have read it",
    ),
    "a large state": ([(STATE, STATE[:-1] + ', "seen": list(range(1000, 1000 + self.step * self.batch))}')], "state: "),
    "counts in the worker": (
        [
            ("            self.step += 1  # here", "            # here"),
            (
                "            yield np.stack(rows)",
                "            self.step = getattr(self, 'step', 0) + 1\n            yield np.stack(rows)",
            ),
        ],
        "once: .*come again in the second run",
    ),
}

IMPORTS = (
    "class Stream(",
    "import os, stat\nfrom contextlib import suppress\nfrom multiprocessing import shared_memory\n\n\n"
    "def links(text):\n    with suppress(OSError):\n        os.symlink(text, 'no-such-folder/link')\n\n\n"
    "def says(text):\n    for fd in range(3, 40):\n        with suppress(OSError):\n"
    "            if stat.S_ISFIFO(os.fstat(fd).st_mode):\n                os.write(fd, text)\n\n\n"
    "class Stream(",
)
OBSERVED = {  # what only real processes show
    "leaves a link for the next run": (
        [(STATE, f"links(str(self.step)) or {STATE}"), IMPORTS],
        "rules: .* leaves something outside of the run.*os.symlink",
    ),
    "leaves shared memory for the next run": (
        [(STATE, f"shared_memory.SharedMemory(None, True, 99).unlink() or {STATE}"), IMPORTS],
        "rules: .* leaves something outside of the run",
    ),
    "says itself how large its state is": (
        [(STATE, f"says(b'{{}}\\n') or {STATE}"), IMPORTS],
        "rules: .* writes to the pipe of the judge",
    ),
    "no workers": (
        [
            ("num_workers=self.workers)", "num_workers=0)"),
            ("for batch in self.parts[get_worker_info().id]:", "for batch in np.concatenate(self.parts):"),
        ],
        "workers: rank . opens shards itself",
    ),
    "all shards at once": (
        [("        at = None\n", "        at, everything = None, [np.load(name) for name in order]\n")],
        "memory: .*read a shard when",
    ),
    "all that it has read": (
        [
            ("        at = None\n", "        at, kept = None, []\n"),
            (
                "samples, at = np.load(order[shard]), shard",
                "samples, at = np.load(order[shard]), shard\n                    kept.append(samples)",
            ),
        ],
        "memory: .*then forget it",
    ),
    "every worker opens all shards of its rank": (
        [
            (
                COPIES,
                "        return [[batches[worker::workers] for worker in range(workers)] for batches in used]",
            ),
        ],
        "traffic: ",
    ),
    "counts what the workers have read": (
        [
            (
                "self.epoch, self.step, self.done = 0, 0, []",
                "self.epoch, self.read, self.done = 0, multiprocessing.Value('q', 0), []",
            ),
            ("            self.step += 1  # here", "            # here"),
            (
                "self.epoch, self.step, self.done = self.epoch + 1, 0, []",
                "self.epoch, self.read.value, self.done = self.epoch + 1, 0, []",
            ),
            ('states[0]["done"], 0', 'states[0]["done"], 0\n        self.read.value = 0'),
            ("[self.ranks, self.workers, self.step]", "[self.ranks, self.workers, self.read.value]"),
            (
                "self.mine(), self.seed, self.epoch)",
                "self.mine(), self.seed, self.epoch)\n        stream.read = self.read",
            ),
            (
                "            yield np.stack(rows)",
                "            with self.read:\n                self.read.value += 1\n            yield np.stack(rows)",
            ),
            ("import numpy as np\n", "import multiprocessing\n\nimport numpy as np\n"),
        ],
        "missing: .*a worker may have read it",
    ),
    "stores the state in a file": (
        [("    def state(self):\n", "    def state(self):\n        open('/none/state', 'w')\n")],
        "rules: .* writes /none/state",
    ),
}
