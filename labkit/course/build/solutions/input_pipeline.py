"""A loader of shard files that keeps up, and that resumes in the middle of an epoch on any number of ranks: the
reference solution of lab 09."""

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Loader:
    """The batches of one rank. All samples of an epoch have an order that every rank can compute; `done` says what was
    trained on: for each run of this epoch its ranks, its workers per rank, and its steps."""

    def __init__(self, files, rank, ranks, workers, batch, seed):
        self.files, self.rank, self.ranks, self.workers = files, rank, ranks, workers
        self.batch, self.seed = batch, seed
        self.epoch, self.step, self.done = 0, 0, []

    def __iter__(self):
        stream = Stream(self.files, self.mine(), self.seed, self.epoch)
        for batch in DataLoader(stream, batch_size=None, num_workers=self.workers):
            self.step += 1  # here, where the batch leaves the loader, and not in the worker that has read it
            yield batch
        self.epoch, self.step, self.done = self.epoch + 1, 0, []

    def state(self):
        return {"epoch": self.epoch, "done": [*self.done, [self.ranks, self.workers, self.step]]}

    def load(self, states):
        self.epoch, self.done, self.step = states[0]["epoch"], states[0]["done"], 0

    def mine(self):
        """For each worker of this rank the positions in the epoch's order, (batches, batch)."""
        left = np.arange(sum(self.files.values()))
        for ranks, workers, steps in self.done:
            trained = [
                part[: (steps - worker + workers - 1) // workers].ravel()  # workers deliver in turn
                for parts in self.divided(left, ranks, workers)
                for worker, part in enumerate(parts)
            ]
            left = np.setdiff1d(left, np.concatenate(trained))
        return self.divided(left, self.ranks, self.workers)[self.rank]

    def divided(self, left, ranks, workers):
        """Neighbouring positions for each worker of each rank. Less than a batch for each rank is left."""
        count = len(left) // (ranks * self.batch)
        used = left[: count * ranks * self.batch].reshape(ranks, count, self.batch)
        return [np.array_split(batches, workers) for batches in used]


class Stream(IterableDataset):
    """What a worker reads: its part, one shard at a time."""

    def __init__(self, files, parts, seed, epoch):
        self.files, self.parts, self.seed, self.epoch = files, parts, seed, epoch

    def __iter__(self):
        order = np.random.default_rng([self.seed, self.epoch]).permutation(sorted(self.files))
        ends = np.cumsum([self.files[name] for name in order])
        at = None
        for batch in self.parts[get_worker_info().id]:
            rows = []
            for position in batch:
                shard = int(np.searchsorted(ends, position, side="right"))
                if shard != at:
                    samples, at = np.load(order[shard]), shard
                    shuffled = np.random.default_rng([self.seed, self.epoch, shard]).permutation(len(samples))
                rows.append(samples[shuffled[position - ends[shard] + len(samples)]].copy())
            yield np.stack(rows)
