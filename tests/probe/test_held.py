"""The walk over Python's objects: what it finds, and that no object can break it."""

from __future__ import annotations

import gc
import math
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from labkit.probe.journal import Journal
from labkit.probe.memory import Census, Held, MemoryWatch, WorkersBatches

CPU = torch.device("cpu")


def counted(held: Held) -> tuple[set[int], set[int]]:
    """Addresses of the tensors found: parameters, and the rest without data sets."""
    census = Census(CPU)
    census.add(held.parameters(), "parameters")
    census.leave_out(held.data())
    census.add(held.rest(), "other")
    found = {
        owner: {address for address, (whose, _) in census.counted.items() if whose == owner}
        for owner in ("parameters", "other")
    }
    return found["parameters"], found["other"]


def walked(times: int = 2) -> Held:
    held = Held(WorkersBatches())
    for _ in range(times):
        held.walk(CPU)
    return held


def test_a_tensor_counts_once_it_has_outlived_a_step():
    held, kept = Held(WorkersBatches()), [torch.zeros(10)]
    held.walk(CPU)
    assert kept[0].data_ptr() not in counted(held)[1]
    batch = torch.zeros(10)
    held.walk(CPU)
    assert kept[0].data_ptr() in counted(held)[1] and batch.data_ptr() not in counted(held)[1]
    address = kept.pop().data_ptr()
    assert address not in counted(held)[1], "the walk does not keep tensors alive"


def test_modules_count_whether_they_train_or_not():
    frozen = nn.BatchNorm1d(8).requires_grad_(False)
    scripted = torch.jit.script(nn.Linear(3, 4))
    parameters, rest = counted(walked())
    assert {frozen.weight.data_ptr(), scripted.weight.data_ptr()} <= parameters
    assert frozen.running_mean.data_ptr() in rest


def test_data_sets_do_not_count_on_a_host():
    class Own(Dataset):
        def __init__(self) -> None:
            self.parts = {"train": [torch.zeros(7), torch.zeros(7)]}

        def __len__(self) -> int:
            return 2

    whole = torch.zeros(40, 2)
    sets = [TensorDataset(whole[:20]), Own(), DataLoader([torch.zeros(5) for _ in range(3)])]
    held = walked()
    _, rest = counted(held)
    inside = [whole, *sets[1].parts["train"], *sets[2].dataset]
    assert not rest & {tensor.data_ptr() for tensor in inside}


def test_nothing_that_it_meets_breaks_it():
    class Liar:
        @property
        def __class__(self):
            raise RuntimeError("a proxy whose object is gone")

    odd = [
        Liar(),
        nn.LazyLinear(3),
        nn.Linear.__new__(nn.Linear),
        torch.zeros(2, 2).to_sparse(),
        torch.empty(3, device="meta"),
    ]
    assert len(counted(walked())) == 2 and len(odd) == 5


def test_a_walk_takes_a_thousandth_of_the_time_at_most(monkeypatch):
    now = [100.0]

    def objects() -> list:
        now[0] += 0.05
        return []

    monkeypatch.setattr("labkit.probe.memory.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(gc, "get_objects", objects)
    held = Held(WorkersBatches())
    assert held.is_due
    held.walk(CPU)
    now[0] += 49
    assert not held.is_due
    now[0] += 2
    assert held.is_due


def test_what_a_step_leaves_behind_counts_until_it_is_freed(tmp_path):
    watch, left = MemoryWatch(Journal(tmp_path, 0)), torch.zeros(10)
    address, view = left.data_ptr(), left[2:]
    assert address not in watch.held()[0], "it lives only within a step"
    released: dict[int, float] = {}
    assert watch.held(released)[0][address] == ("other", 40)
    del left
    assert released[address] == math.inf, "a view of it is alive"
    before = time.time_ns()
    del view
    assert before <= released[address] <= time.time_ns()
