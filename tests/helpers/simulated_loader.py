"""The runs of the exercise about loaders in one process and without files, so that hundreds of draws take seconds."""

from __future__ import annotations

import copy
import json
import sys
from types import SimpleNamespace

import numpy as np

from labkit.course.exercises.input_pipeline import Rank


def observed(answer, task, monkeypatch):
    """What `loader.observe` returns, for the solution or a change of it; its workers deliver in turn."""
    module, runs, states = sys.modules[answer.__module__], [], []
    current = SimpleNamespace(rank=None, worker=0)
    files = {f"{shard:04d}": count for shard, count in enumerate(task.counts)}

    def load(name):
        rank, shard = current.rank, int(name)
        process = 1 + 100 * len(rank.epochs) + current.worker
        began = any(rank.epochs)
        rank.opens.append((shard, process, 0, max(len(rank.epochs) - 1, 0), began))
        return shard * 1000 + np.arange(files[name])[:, None]

    def batches(dataset, batch_size, num_workers):
        streams = {worker: iter(copy.copy(dataset)) for worker in range(num_workers)}
        while streams:
            for worker, stream in list(streams.items()):
                current.worker = worker
                batch = next(stream, None)
                if batch is None:
                    del streams[worker]
                else:
                    yield batch

    def info():
        return SimpleNamespace(id=current.worker, num_workers=task.workers)

    def took(batch):
        current.rank.epochs[-1].append([(int(number) // 1000, int(number) % 1000) for number in batch[:, 0]])

    monkeypatch.setattr(module, "DataLoader", batches)
    monkeypatch.setattr(module, "get_worker_info", info)
    monkeypatch.setattr(np, "load", load)
    for part in task.to_json(list(files))["parts"]:
        runs.append([Rank(rank, ended=True) for rank in range(part["ranks"])])
        new = []
        for rank in runs[-1]:
            current.rank = rank
            loader = answer(files, rank.rank, part["ranks"], task.workers, task.batch, task.seed)
            if states:
                loader.load(json.loads(json.dumps(states)))
            for _ in range(part["epochs"]):
                rank.epochs.append([])
                for batch in loader:
                    took(batch)
            if part["steps"]:
                rank.epochs.append([])
                for _, batch in zip(range(part["steps"]), loader):
                    took(batch)
            new.append(loader.state())
            rank.state_bytes = len(json.dumps(new[-1]))
        states = new
    return runs
