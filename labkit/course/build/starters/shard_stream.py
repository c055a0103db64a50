"""Reads shard files as a stream, with two workers on each rank: torchrun … shard_stream.py FOLDER DIVIDED

DIVIDED says who divides the shards: nobody, ranks, or workers. Each step ends with an all-reduce, as in a training. A
rank writes what it got to FOLDER/DIVIDED-RANK.json.
"""

import json
import multiprocessing
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

WORKERS, BATCH, BUFFER, LOOK = (
    2,
    8,
    16,
    6,
)  # LOOK: the step after which a rank compares what it has got with its workers


class Stream(IterableDataset):
    """The samples of the shards, through a shuffle buffer."""

    def __init__(self, files, rank, ranks, divided):
        self.files, self.rank, self.ranks, self.divided = files, rank, ranks, divided
        self.position, self.read = 0, multiprocessing.Value("q", 0)  # an ordinary number, and one that workers share

    def shards(self):
        worker = get_worker_info()
        if self.divided == "ranks":
            return self.files[self.rank :: self.ranks]
        if self.divided == "workers":
            reader, readers = self.rank * worker.num_workers + worker.id, self.ranks * worker.num_workers
            return self.files[reader::readers]
        return self.files

    def __iter__(self):
        numbers, buffer = random.Random(1234), []
        for file in self.shards():
            for sample in np.load(file):
                self.position += 1
                buffer.append(sample)
                if len(buffer) > BUFFER:
                    yield self.delivered(buffer.pop(numbers.randrange(len(buffer))))
        numbers.shuffle(buffer)
        yield from map(self.delivered, buffer)

    def delivered(self, sample):
        with self.read:
            self.read.value += 1
        return sample, torch.rand(())  # a random number, as an augmentation would draw it


def main(folder, divided):
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # so that all ranks create equal parameters
    stream = Stream(sorted(Path(folder).glob("*.npy")), rank, ranks, divided)
    loader = DataLoader(stream, batch_size=BATCH, num_workers=WORKERS)
    got = {"epochs": [], "random": []}
    try:
        for _ in range(2):
            got["epochs"].append([])
            for step, (samples, numbers) in enumerate(loader):
                dist.all_reduce(torch.ones(1))  # stands for the gradients
                got["epochs"][-1].append(samples.tolist())
                if len(got["random"]) < WORKERS:  # workers deliver in turn
                    got["random"].append(round(numbers[0].item(), 3))
                if step + 1 == LOOK and "look" not in got:
                    time.sleep(0.5)  # a slow step: the workers prefetch meanwhile
                    counts = {"trained": LOOK * BATCH, "position": stream.position, "read": stream.read.value}
                    got["look"] = counts
    finally:
        (Path(folder) / f"{divided}-{rank}.json").write_text(json.dumps(got))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
