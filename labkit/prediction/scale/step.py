"""How long a step takes under a layout, and how much a rank sends, by axis of the device mesh.

The rules, each a simplification that is named here:

- Computation: FLOPs / (peak × efficiency of the accelerator), at any size of matrices. The optimizer reads and writes
  its states once, at the bandwidth of the memory.
- Data parallelism: communication overlaps with the computation of the other layers in the same direction. That of one
  layer, the last one's reduction or the first one's gathering, is always exposed, and so is what follows the optimizer.
- Tensor parallelism with sequence parallelism: two all-gathers and two reduce-scatters per layer and direction, all
  exposed (Korthikanti et al. 2022, section 4.2.2). Context parallelism: keys and values are all-gathered, their
  gradients reduce-scattered, exposed (The Llama 3 Herd of Models, 2024, section 3.3.2).
- Pipelines: 1F1B with m micro-batches in p stages takes m + p − 1 times as long as a micro-batch in the slowest stage
  (Narayanan et al. 2021, section 2.2.1); each sends its outputs and their gradients, exposed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from labkit.analysis.theory.states import RECIPES
from labkit.prediction.scale.layouts import Layout
from labkit.prediction.scale.memory import Memory, layers_of, numbers_of
from labkit.prediction.scale.training import Training
from labkit.record.writer import sent

AXES = ("data", "tensor", "context", "pipeline")


@dataclass(frozen=True)
class Estimate:
    """A layout with its memory and the time of its step. All figures are modelled.

    - `parts`: the seconds of a step by what they are spent on; they add up to `seconds`. Only exposed communication
      counts.
    - `sent`: bytes that a rank sends per step, by axis; `busy`: the seconds of that communication without overlap.
    """

    training: Training
    layout: Layout
    memory: Memory
    parts: Mapping[str, float]
    sent: Mapping[str, float]
    busy: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks."""
        return self.training.batch * self.training.sequence / self.seconds

    @property
    def flops_per_device(self) -> float:
        """FLOP/s that the model needs, per device; recomputation does not count."""
        each = self.training.model.training_flops(self.training.sequence)
        return each * self.tokens_per_second / self.training.devices

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: `flops_per_device` divided by the peak."""
        return self.flops_per_device / self.training.accelerator.peak(self.training.precision)

    @property
    def exposed(self) -> float:
        """Seconds per step in which only communication makes progress; the pipeline's bubble is not included."""
        return sum(self.parts[axis] for axis in AXES)

    @property
    def communication_bound(self) -> bool:
        """Whether the communication of a step, without overlap, takes longer than its computation."""
        return sum(self.busy.values()) > self.parts["computation"] + self.parts["recomputation"]


def estimate(training: Training, layout: Layout, memory: Memory) -> Estimate:
    """The time and traffic of a step. `LookupError` if the machine has no such links."""
    return Estimate(training, layout, memory, *_Step(training, layout).figures())


class _Step:
    """The times of one layout, in seconds; sizes in bytes."""

    def __init__(self, training: Training, layout: Layout):
        self.training, self.layout, self.model = training, layout, training.model
        self.tokens = layout.micro_batch * training.sequence / layout.context
        self.layers = layers_of(training, layout, 0)  # the first stage has the most
        self.numbers = numbers_of(training, layout, 0)
        self.busy = dict.fromkeys(AXES, 0.0)  # without overlap
        self.sent = dict.fromkeys(AXES, 0.0)

    def figures(self) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        """The seconds of the parts of a step, bytes sent and busy seconds by axis."""
        layout = self.layout
        forward = self._forward()
        backward = (2 + layout.recompute) * forward
        gathered, reduced, last, after = self._data(forward, backward)
        tensor, context, sends = self._tensor(), self._context(), self._sends()
        tick = forward + backward + gathered + reduced + tensor + context + sends
        count = layout.micro_batches
        parts = {
            "computation": 3 * forward * count,
            "recomputation": layout.recompute * forward * count,
            "data": (gathered + reduced) * count + last + after,
            "tensor": tensor * count,
            "context": context * count,
            "pipeline": sends * count,
            "bubble": (layout.pipeline - 1) * tick,
            "optimizer": self._optimizer(),
        }
        return parts, self.sent, self.busy

    def _forward(self) -> float:
        """Computation of a micro-batch in the slowest stage."""
        layout, sequence = self.layout, self.training.sequence
        last = layers_of(self.training, layout, layout.pipeline - 1)
        flops = self.model.layer_flops(sequence)
        slowest = max(self.layers * flops, last * flops + self.model.head_flops)
        return self.tokens * slowest / layout.tensor / self.training.rate

    def _optimizer(self) -> float:
        each, layout = RECIPES[self.training.recipe], self.layout
        shards = layout.shards if "optimizer" in layout.sharding.owners else 1
        moved = each["gradients"] + 2 * (each["parameters"] + each["optimizer"])
        return moved * self.numbers / shards / self.training.accelerator.bandwidth

    # ---- communication

    def _call(self, axis: str, operation: str, size: float, ranks: int, stride: int, times: float) -> float:
        """The seconds of one call, of which `times` are made per step."""
        if ranks == 1:
            return 0.0
        seconds = self.training.seconds(operation, size, ranks, stride)
        self.busy[axis] += seconds * times
        self.sent[axis] += sent(operation, size, ranks) * times
        return seconds

    def _data(self, forward: float, backward: float) -> tuple[float, float, float, float]:
        """Exposed per micro-batch in forward and in backward, and once per step in the last backward and after the
        optimizer."""
        sharding, count = self.layout.sharding, self.layout.micro_batches
        gathers = self._units(sharding.forward, count)
        often = self._units(sharding.backward, count)
        once = self._units(sharding.once, 1)
        after = self._units(sharding.after, 1)[1]
        ahead = 1 - 1 / self.layers  # the part of a direction that overlaps with the communication of other layers
        gathered = _exposed(gathers, forward * ahead)
        reduced = _exposed(often, backward * ahead)
        both = often[0] + once[0], often[1] + once[1]
        return gathered, reduced, _exposed(both, backward * ahead) - reduced, after

    def _units(self, operations: Iterable[str], times: int) -> tuple[float, float]:
        """The seconds of operations on a layer (of the last one of them), and on all parameters of the rank."""
        edge = total = 0.0
        ends = self.numbers - self.layers * self.model.of_layer(self.layout.tensor)
        for operation in operations:
            each = self._unit(operation, self.model.of_layer(self.layout.tensor), times * self.layers)
            edge, total = each, total + self.layers * each + self._unit(operation, ends, times)
        return edge, total

    def _unit(self, operation: str, numbers: float, times: int) -> float:
        layout, training = self.layout, self.training
        wide = training.wide if operation == "all_gather" else RECIPES[training.recipe]["gradients"]
        if operation == "all_reduce":  # of what the groups of shards do not share
            stride = layout.tensor * (layout.shards if layout.replicas > 1 else 1)
            ranks = layout.replicas if layout.sharding.owners else layout.synced
            size = wide * numbers / (layout.shards if layout.sharding.owners else 1)
            return self._call("data", operation, size, ranks, stride, times)
        return self._call("data", operation, wide * numbers, layout.shards, layout.tensor, times)

    def _tensor(self) -> float:
        """Per micro-batch: of each layer, and of embedding and head without a pipeline. Recomputation repeats what
        forward needs, which is all but a layer's last reduce-scatter."""
        layout, ends = self.layout, self.layout.pipeline == 1
        size = self.training.wide * self.tokens * self.model.width
        calls = {
            "all_gather": (4 + 2 * layout.recompute) * self.layers + 2 * ends,
            "reduce_scatter": (4 + layout.recompute) * self.layers + ends,
        }
        return self._calls("tensor", calls, size, layout.tensor, 1)

    def _context(self) -> float:
        """Per micro-batch: keys and values of the whole sequence."""
        layout = self.layout
        size = self.training.wide * self.tokens * layout.context * self.model.keys_and_values / layout.tensor
        calls = {"all_gather": (1 + layout.recompute) * self.layers, "reduce_scatter": self.layers}
        return self._calls("context", calls, size, layout.context, layout.tensor)

    def _calls(self, axis: str, calls: Mapping[str, int], size: float, ranks: int, stride: int) -> float:
        """The seconds of some calls of each operation in every micro-batch."""
        count = self.layout.micro_batches
        return sum(times * self._call(axis, one, size, ranks, stride, times * count) for one, times in calls.items())

    def _sends(self) -> float:
        """Per micro-batch: a stage's outputs, of which each tensor-parallel rank sends a part, and their gradients. Of
        two stages, each sends one of them and waits for the other."""
        layout = self.layout
        if layout.pipeline == 1:
            return 0.0
        size = self.training.wide * self.tokens * self.model.width / layout.tensor
        seconds = self.training.send(size, layout.devices // layout.pipeline)
        self.busy["pipeline"] += 2 * seconds * layout.micro_batches
        self.sent["pipeline"] += min(2, layout.pipeline - 1) * size * layout.micro_batches
        return 2 * seconds


def _exposed(units: tuple[float, float], computation: float) -> float:
    """The exposed part of communication: the seconds of one unit, and what of the rest exceeds the computation."""
    edge, total = units
    return edge + max(0.0, total - edge - computation)
