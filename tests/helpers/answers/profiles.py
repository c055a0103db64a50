"""Answers to the exercises of lab 20: the slow script with all, some and none of its faults, and cheats."""

import os
from pathlib import Path

from labkit.course.build.solutions import profiles as training
from labkit.course.build.starters import slow_training

SLOW = Path(slow_training.__file__).read_text(encoding="utf-8")
FAST = Path(training.__file__).read_text(encoding="utf-8")
DDP = """\
        self.wrapped = nn.parallel.DistributedDataParallel(self.model)
        self.optimizer ="""
NO_SYNC = """\
        for number, (inputs, targets) in enumerate(batches, 1):
            self.wrapped.require_backward_grad_sync = number == len(batches)
            logits = self.wrapped(inputs)"""


def changed(text, *changes):
    """The text with each (old, new) of `changes` replaced."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


def script(text, name="fast_training.py"):
    """The path of a script with this text, in the folder of this test's runs."""
    path = Path(os.environ["LABKIT_RUNS"]) / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


EVERY_MICRO_BATCH = (
    (
        "            mean += loss.detach()\n",
        "            self.average_gradients()\n            mean += loss.detach()\n",
    ),
    ("        self.average_gradients()\n        nn.utils", "        nn.utils"),
)
PER_PARAMETER = (
    "        dist.all_reduce(flat)\n",
    "        for part in flat.split([gradient.numel() for gradient in gradients]):\n"
    "            dist.all_reduce(part)\n",
)
READS = ("mean += loss.detach()", "mean += loss.item()")
TAKES = ("mean += loss.detach()", "mean += loss.detach().tolist()")
ONE_BY_ONE = (
    "[self.text[start : start + POSITIONS + 1] for start in starts]",
    "[torch.stack([self.text[i] for i in range(start, start + POSITIONS + 1)]) for start in starts]",
)
MATERIALIZES = (
    "y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)",
    "later = torch.ones(positions, positions, dtype=torch.bool).triu(1)\n"
    "        y = (q @ k.mT / 4).masked_fill(later, -torch.inf).softmax(-1) @ v",
)
WITH_DDP = (
    ("        self.optimizer =", DDP),
    ("        for inputs, targets in batches:\n            logits = self.model(inputs)", NO_SYNC),
    ("        self.average_gradients()\n", ""),
)
ONE_FAULT = {  # a script with one of the faults, and the words that name it
    "data": (changed(FAST, ONE_BY_ONE), "1 of 5 faults are left: data: torch runs"),
    "attention": (changed(FAST, MATERIALIZES), "1 of 5 faults are left: attention: outside of"),
    "traffic": (changed(FAST, *EVERY_MICRO_BATCH), "1 of 5 faults are left: traffic: a rank sends"),
    "collectives": (changed(FAST, PER_PARAMETER), "1 of 5 faults are left: collectives: 30 calls"),
    "synchronization": (changed(FAST, READS), "1 of 5 faults are left: synchronization: `load` and `step` hand 4"),
    "taken": (changed(FAST, TAKES), "1 of 5 faults are left: synchronization: `load` and `step` hand"),
}
CHEATS = {  # what is faster because it does not train the same
    "smaller model": (
        changed(FAST, ("LAYERS, HEADS, WIDTH, POSITIONS = 2", "LAYERS, HEADS, WIDTH, POSITIONS = 1")),
        "raised RuntimeError: Error(s) in loading",
    ),
    "fewer micro-batches": (changed(FAST, ("in batches:", "in batches[:2]:")), "losses: in step 0, rank 0 has"),
    "no communication": (changed(FAST, ("dist.all_reduce(flat)", "flat *= 2")), "losses: in step 1, rank"),
    "half of the bytes": (
        changed(
            FAST,
            (
                "        dist.all_reduce(flat)\n",
                "        flat = flat.bfloat16()\n        dist.all_reduce(flat)\n        flat = flat.float()\n",
            ),
        ),
        "results: rank 0 has a parameter",
    ),
    "the same batch again": (
        changed(
            FAST, ("        tokens = torch.stack(", "        starts = [0, 1, 2, 3]\n        tokens = torch.stack(")
        ),
        "losses: in step 0, rank 0 has",
    ),
    "loads later": (
        changed(FAST, ("        return tokens[:, :-1], tokens[:, 1:]", "        return starts, starts")),
        "load must return inputs and targets",
    ),
    "loads in later steps": (
        changed(
            FAST,
            (
                "        tokens = torch.stack([",
                '        self.loads = getattr(self, "loads", 0) + 1\n        if self.loads > MICRO_BATCHES:\n'
                "            return starts\n        return self.loaded(starts)\n\n"
                "    def loaded(self, starts):\n        tokens = torch.stack([",
            ),
            (
                "        for inputs, targets in batches:\n",
                "        for batch in batches:\n"
                "            inputs, targets = batch if isinstance(batch, tuple) else self.loaded(batch)\n",
            ),
        ),
        "load must return inputs and targets",
    ),
    "reads the loss while it loads": (
        changed(
            FAST,
            (
                "        tokens = torch",
                '        self.seen = float(getattr(self, "mean", torch.zeros(())))\n        tokens = torch',
            ),
            (
                "        self.average_gradients()\n        nn",
                "        self.mean = mean\n        self.average_gradients()\n        nn",
            ),
        ),
        "synchronization: `load` and `step` hand 4",
    ),
    "cached": (
        changed(
            FAST,
            (
                "        self.optimizer.zero_grad()\n",
                '        if hasattr(self, "mean"):\n            return self.mean\n        self.optimizer.zero_grad()\n',
            ),
            ("        return mean\n", "        self.mean = mean\n        return mean\n"),
        ),
        "losses: in step 1, rank",
    ),
    "another rule of learning": (
        changed(FAST, ("MAX_NORM = 0.1, 0.9, 0.5", "MAX_NORM = 0.1, 0.0, 0.5")),
        "results: rank 0 has",
    ),
}
ODD = {  # no script that can be judged
    "no class": ("import torch\n", "does not define the class Training"),
    "no Python": ("def f(:\n", "is not valid Python"),
    "raises": (
        changed(FAST, ("        self.optimizer.zero_grad()\n", "        raise KeyError(1)\n")),
        "raised KeyError: 1 in step of step 0",
    ),
}


def gain(step, part, left):
    return step / (step - part + left)


def saved(step, part, left):
    return (part - left) / step


RIGHT = {
    "gain": gain,
    "launches": 2.94,
    "faults": lambda: script(FAST),
}
WRONG = {
    "gain": (saved, "the fraction of a step that is saved"),
    "launches": (4.35, "for launches the GPU waits for less of it"),
    "faults": (lambda: script(SLOW), "it trains the same; 5 of 5 faults are left: data: torch runs 1,035 operators"),
}
