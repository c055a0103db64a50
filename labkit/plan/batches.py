"""The arithmetic of batches and steps, which `Spec` inherits; a rank, a step and a sample are counted here only."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

from labkit.common.units import counted
from labkit.training.rows import Data, Strategy, Workload
from labkit.training.strategies import STRATEGIES
from labkit.training.workloads import DATA, WORKLOADS

if TYPE_CHECKING:
    from labkit.training.request import Request


class Batches:
    """What follows from the fields of a Spec."""

    @property
    def request(self) -> Request:
        """This Spec of a strategy, with the number of ranks resolved, as the tables and the formulas use it."""
        return cast("Request", self)

    # ---- the rows of the tables

    @property
    def strategy_row(self) -> Strategy:
        """The strategy's row of the table."""
        return STRATEGIES[self.request.strategy]

    @property
    def workload_row(self) -> Workload:
        """The workload's row of the table."""
        return WORKLOADS[self.request.workload]

    @property
    def data_row(self) -> Data:
        """The data set's row of the table."""
        return DATA[self.request.data]

    # ---- the arithmetic of batches and steps

    @property
    def name(self) -> str:
        """The end of the run folder's name: the strategy or script, and the number of ranks, such as `ddp-x2`."""
        path = self.request.script
        stem = path.replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".py") if path else self.request.strategy
        return f"{stem}-x{self.request.nproc or 1}"

    @property
    def processes(self) -> int:
        """Processes that torchrun starts: one per device, unless the strategy drives all devices from one process."""
        request = self.request
        return request.nproc if request.script is not None else self.strategy_row.processes(request)

    @property
    def train_samples(self) -> int:
        """Samples per epoch, over all ranks."""
        return self.request.samples or self.data_row.train

    @property
    def data_ranks(self) -> int:
        """Data-parallel ranks: the number of different shards that each step's batch is split into."""
        return self.strategy_row.data_ranks(self.request)

    @property
    def batch_per_rank(self) -> int:
        """Samples per rank in a full step: the batch, or the rank's whole shard of the data set if that is smaller."""
        return min(self.wanted_per_rank, self.shard)

    @property
    def wanted_per_rank(self) -> int:
        """Samples per rank and step according to `batch_size`, of which a rank may have fewer."""
        batch = self.request.batch_size
        return batch if self.request.scaling == "weak" else batch // self.data_ranks

    @property
    def shard(self) -> int:
        """Samples of one rank per epoch, rounded up as `DistributedSampler` does."""
        return math.ceil(self.train_samples / self.data_ranks)

    @property
    def global_batch(self) -> int:
        """The global batch size: samples of a full step, over all ranks."""
        return self.batch_per_rank * self.data_ranks

    @property
    def steps_per_epoch(self) -> int:
        """Steps per epoch: the samples of a rank's shard divided by its batch, rounded up."""
        return math.ceil(self.shard / self.batch_per_rank)

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None for a user's script, because only the script knows."""
        if self.request.script is not None:
            return None
        epochs = self.request.epochs
        return self.request.steps or (epochs * self.steps_per_epoch if epochs else None)

    @property
    def batch_sentence(self) -> str:
        """The batch in words: `128 per rank × 2 = 256 global · 235 steps per epoch`."""
        return (
            f"{self.batch_per_rank} per rank × {self.data_ranks} = {self.global_batch} global ·"
            f" {counted(self.steps_per_epoch, 'step')} per epoch"
        )
