"""How long a step of a training takes under a layout, what a rank stores, and how much it sends, by axis of the device
mesh.

Each term, with its source; what is fitted, and to which runs, is in labkit/MEASUREMENTS.md:

- Matrix products: FLOPs / (peak × efficiency), and longer by an edge for each short side (`product`). Fused attention:
  its causal FLOPs at its own rate, which grows with the length of the sequence (`attention`). All other operations, the
  accumulation of gradients, the loss and the optimizer: bytes / bandwidth of the memory.
- Launch: the host threads launch the kernels of a layer in a time that is the framework's; a micro-batch takes as long
  as its kernels or as launching them. Tensor-parallel ranks wait for the slowest of them at each collective.
- Data parallelism: communication overlaps with the computation of the other layers in the same direction. That of one
  layer, the last one's reduction or the first one's gathering, is always exposed, and so is what follows the optimizer.
- Tensor parallelism with sequence parallelism: two all-gathers and two reduce-scatters per layer and direction, exposed
  (Korthikanti et al. 2022, section 4.2.2) unless the layout is asynchronous. Context parallelism: keys and values are
  all-gathered, their gradients reduce-scattered, exposed (The Llama 3 Herd of Models, 2024, section 3.3.2).
- Pipelines: m micro-batches take m times as long as one in the slowest stage, and to fill and drain, (p − 1)/v times as
  long as one in an average stage of v chunks (1F1B and interleaved 1F1B: Narayanan et al. 2021, section 2.2); each
  sends its outputs and their gradients, exposed.
- Every rank waits for the slowest one: a part of the step for each doubling of the nodes. An allocator whose device is
  nearly full frees and allocates again in every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import exp, gcd, log2

from labkit.analysis.theory.formulas import RECIPES, States
from labkit.prediction.devices import Accelerator, Device
from labkit.prediction.links import CommunicationModel
from labkit.prediction.scale.layouts import USABLE, Framework, Layout, Stage, stages
from labkit.prediction.scale.model import Model
from labkit.prediction.timing import product_seconds
from labkit.record.writer import sent

# ---- what is trained, on what

# Products in fp8 by how numbers are scaled: their efficiency, relative to that in 16 bits, and the traffic of all other
# operations, relative to that without conversions. Fitted to torchtitan's benchmarks.
FP8 = {"tensorwise": (0.9, 1.5), "rowwise": (0.5, 2.0)}
CROWDED_DEVICES, CROWDED_SAMPLES = 256, 512
RESERVED_FOR = (
    "the rest is for the CUDA context, cuBLAS workspaces, NCCL buffers and fragmentation, as in vLLM's default"
    " gpu_memory_utilization of 0.9"
)


@dataclass(frozen=True)
class Training:
    """A model trained on `devices` of a machine with `batch` samples of `sequence` tokens per step, globally.

    `memory` is that of a device, in bytes; `precision` one that the accelerator has; `attention` is fused or eager;
    `scaling` of numbers in fp8 is `tensorwise` or `rowwise`.
    """

    model: Model
    machine: Device
    accelerator: Accelerator
    links: CommunicationModel = field(repr=False)
    devices: int
    batch: int
    sequence: int
    memory: int
    precision: str
    attention: str = "fused"
    scaling: str = "tensorwise"

    @property
    def usable(self) -> float:
        """Bytes of a device that the training may use."""
        return self.memory * USABLE

    @property
    def wide(self) -> int:
        """Bytes per number in computation and communication; products in fp8 read and write 16-bit numbers."""
        return 2 if self.precision in ("bf16", "fp16", "fp8") else 4

    @property
    def sixteen(self) -> str:
        """The precision of what is not computed in fp8: attention and the head."""
        return "bf16" if self.precision == "fp8" else self.precision

    @property
    def casts(self) -> float:
        """Traffic of the operations between matrix products, relative to that without conversion to fp8."""
        return FP8[self.scaling][1] if self.precision == "fp8" else 1.0

    @property
    def recipe(self) -> str:
        """The name in `RECIPES` of the bytes per parameter of the states."""
        return "mixed" if self.wide == 2 else "fp32"

    @cached_property
    def rate(self) -> float:
        """FLOP/s of large matrix products, in 16 bits if the layers compute in fp8."""
        return self.accelerator.peak(self.sixteen) * self.accelerator.efficiency

    def product(self, rows: float, columns: float, inner: float, *, layers: bool) -> float:
        """The seconds of a matrix product, of the `layers` in the precision of the training, others in 16 bits if that
        is fp8 (`roofline.product_seconds`)."""
        rate = self.accelerator.peak(self.precision if layers else self.sixteen) * self.accelerator.efficiency
        if layers and self.precision == "fp8":
            rate *= FP8[self.scaling][0]
        elements = rows * columns + rows * inner + columns * inner
        return product_seconds(2 * rows * columns * inner, elements, rate)

    @cached_property
    def _known(self) -> dict[tuple[str, int, int, int], float]:
        return {}

    def seconds(self, operation: str, size: float, ranks: int, stride: int) -> float:
        """The seconds of an operation on `size` bytes in a group of `ranks` ranks that are `stride` apart."""
        key = operation, round(size), ranks, stride
        if key not in self._known:
            self._known[key] = self.links.seconds(operation, round(size), ranks, self.nodes(ranks, stride))
        return self._known[key]

    def send(self, size: float, stride: int) -> float:
        """The seconds of a message to the rank that is `stride` away."""
        return self.links.seconds("send", round(size), 2, 1 if stride < self.machine.per_node else 2)

    def crowded(self, layout: Layout) -> float:
        """Seconds per micro-batch that the messages of a pipeline wait in a network that is too busy for them."""
        if self.devices < CROWDED_DEVICES or self.devices * layout.micro_batch < CROWDED_SAMPLES:
            return 0.0
        return 2 * (layout.pipeline - 1) / layout.pipeline * self.machine.crowded

    def nodes(self, ranks: int, stride: int) -> int:
        """The nodes of a group, with equally many of its ranks in each."""
        near = max(1, self.machine.per_node // stride)
        return ranks // (ranks if ranks <= near else gcd(ranks, near))


# ---- bytes that a rank stores under a layout, by owner

_CHUNKS = 8  # of the logits, with a chunked loss (torchtune's default)
_FOUR_BITS = 0.5 + 0.127 / 8  # bytes of a parameter
_PREFETCHED = 2  # layers whose inputs are on the device, if those of all others wait on the host


def stages_of(training: Training, layout: Layout) -> tuple[Stage, ...]:
    return stages(training.model, layout.pipeline, layout.framework.balanced)


def numbers_of(model: Model, stage: Stage, tensor: int) -> int:
    """The parameters of a rank of a stage, before they are sharded; a tied matrix is on the first and the last one."""
    ends = model.before(tensor) * stage.first + model.after(tensor) * stage.last
    tied = model.tied and stage.first and stage.last
    return stage.layers * model.of_layer(tensor) + ends - tied * (model.table // tensor)


@dataclass(frozen=True)
class Memory:
    """Bytes of the rank that stores the most: its model states, activations and communication buffers, and what the
    allocator of its framework reserves besides."""

    states: States
    activations: float
    communication: float
    reserved: float = 0.0

    @property
    def total(self) -> float:
        return self.states.total + self.activations + self.communication + self.reserved

    @property
    def owners(self) -> dict[str, float]:
        """The bytes by owner, as in a measured run."""
        owners = {**vars(self.states), "activations": self.activations, "communication": self.communication}
        return {**owners, "reserved": self.reserved} if self.reserved else owners


def memory(training: Training, layout: Layout) -> Memory:
    """The memory of the rank that stores the most.

    States: the bytes per parameter of the framework, divided by the shards (Rajbhandari et al. 2020, section 5). A
    stage stores the activations of as many micro-batches as there are stages from it to the last one (1F1B, Narayanan
    et al. 2021, section 2.2.1), and (p − 1)/(p·v) more in an interleaved schedule of v chunks per rank (Korthikanti et
    al. 2022, section 4.2.3); with full recomputation, the inputs of its layers and one whole layer.
    """
    every = stages_of(training, layout)
    asked = range(len(every)) if layout.framework.balanced else {0, len(every) - 1}
    return max((_of_stage(training, layout, every[rank], rank) for rank in asked), key=lambda stage: stage.total)


def bytes_per_parameter(training: Training, layout: Layout) -> Mapping[str, float]:
    """The bytes of each owner per parameter. Frozen parameters have neither gradients nor states of an optimizer, and
    those of low-rank adapters, less than a hundredth of the parameters, do not count. In 4 bits, a parameter has 0.5
    bytes and its part of the constants of blocks of 64, quantized themselves (Dettmers et al. 2023, section 3)."""
    states = layout.framework.states if training.recipe == "mixed" else RECIPES["fp32"]
    if layout.trained == "all":
        return states
    return {"parameters": {"lora": training.wide, "qlora": _FOUR_BITS}[layout.trained], "gradients": 0, "optimizer": 0}


def _of_stage(training: Training, layout: Layout, stage: Stage, rank: int) -> Memory:
    model, framework, tensor, wide = training.model, layout.framework, layout.tensor, training.wide
    numbers = numbers_of(model, stage, tensor)
    bytes_of = bytes_per_parameter(training, layout)
    owners = ("parameters", "gradients", "optimizer")
    states = States(*(bytes_of[owner] * numbers / layout.shards_of(owner) for owner in owners))
    if layout.trained == "qlora":  # embedding and head are not quantized
        ends = numbers - stage.layers * model.of_layer(tensor)
        more = (wide - _FOUR_BITS) * ends / layout.shards_of("parameters")
        states = replace(states, parameters=states.parameters + more)
    copies, gathered, reduced = layout.sharding.buffers
    unit = max(model.of_layer(tensor), model.before(tensor) * stage.first, model.after(tensor) * stage.last)
    gradient = min(bytes_of["gradients"], wide) if gathered else bytes_of["gradients"]
    if layout.keeps_gathered:
        buffers = numbers * (wide + bytes_of["gradients"])
    elif framework.unsharded:
        buffers = framework.unsharded * numbers * (layout.synced > 1)
    else:
        buffers = copies * gradient * numbers + unit * (gathered * wide + reduced * gradient)

    tokens = layout.micro_batch * training.sequence / layout.context
    live = float(min(layout.micro_batches, layout.pipeline - rank))
    if layout.chunks > 1:
        live += (layout.pipeline - 1) / layout.chunks
    whole = model.layer_activations(tokens, training.sequence, tensor, wide, training.attention, framework.kept)
    whole *= framework.fused if layout.compiled else 1.0
    whole += wide * tokens * model.keys_and_values * (layout.context - 1) / tensor  # those of the other ranks
    if tensor > 1 and layout.pipeline == 1:
        whole += framework.whole_inputs * wide * tokens * model.width
    kept, working = {
        "none": (whole, 0.0),
        "selective": (framework.selective[1] * whole, 0.0),
        "full": (model.layer_input(tokens, tensor, wide), whole),
    }[layout.recompute]
    activations = (_PREFETCHED if layout.offload else live * stage.layers) * kept + working
    if stage.last:
        logits = tokens / (_CHUNKS if layout.loss == "chunked" else 1)
        activations += model.head_activations(logits, tensor, wide, framework.logits)
    factor, more = framework.reserved
    stored = states.total + activations + buffers
    return Memory(states, activations, buffers, (factor - 1) * stored + more)


AXES = ("data", "tensor", "context", "pipeline")

LENGTH = 1000.0  # positions: attention reaches s / (s + LENGTH) of its rate
HEAD, NARROW = 128, 0.2  # numbers per head at which attention has its rate, which falls with a power of smaller heads
FROZEN = 1.15  # products of backward, relative to forward, if only low-rank adapters are trained: an assumption
BACKWARD = 2.5  # times the FLOPs of forward in fused attention, which computes the scores again (Dao et al. 2022)
NEARLY_FULL = 0.9  # of a device, from which on its allocator may have to free and allocate again in every step
_SHARP, _SHARP_ACROSS = 12, 2.0  # order of the norm that joins computing and launching: nearly the maximum, unless
# collectives of every layer cross nodes, which neither overlap completely


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
    def tokens_per_second_per_gpu(self) -> float:
        """Tokens of a device."""
        return self.tokens_per_second / self.training.devices

    @property
    def memory_bytes(self) -> float:
        """Peak memory of the device that stores the most, as the framework reports it."""
        return self.memory.total

    @property
    def fits(self) -> bool:
        """Whether that is at most what a training may use of a device, and the layout can run."""
        usable = self.layout.framework.usable * self.training.memory
        return self.memory.total <= usable and not self.layout.refused(self.training.model)

    @property
    def flops_per_device(self) -> float:
        """FLOP/s that the model needs, per device; recomputation does not count, and without gradients of frozen
        matrices, backward has half of the FLOPs."""
        needed = 1.0 if self.layout.trained == "all" else 2 / 3
        each = needed * self.training.model.training_flops(self.training.sequence)
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

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """The 80 % range of `seconds`, `tokens_per_second_per_gpu`, `mfu` and `memory_bytes`: least and most. They are
        as wide as the residuals of published runs of the same kind (labkit/MEASUREMENTS.md)."""
        fast, slow = _spread(self._doubts(_TIME))
        less, more = _spread(self._doubts(_BYTES))
        speed = self.tokens_per_second_per_gpu
        return {
            "seconds": (fast * self.seconds, slow * self.seconds),
            "tokens_per_second_per_gpu": (speed / slow, speed / fast),
            "mfu": (self.mfu / slow, self.mfu / fast),
            "memory_bytes": (less * self.memory_bytes, more * self.memory_bytes),
        }

    def _doubts(self, table: Mapping[str, tuple[float, float]]) -> list[tuple[float, float]]:
        """The rows of a table of residuals that hold for this estimate."""
        layout, per_node = self.layout, self.training.machine.per_node
        holds = {
            "always": True,
            "pipeline": layout.pipeline > 1 and layout.devices > per_node,
            "many devices": layout.devices > 64,
            "tensor parallelism across nodes": layout.tensor > per_node,
            "large micro-batches": layout.micro_batch > 4 and layout.tensor > 1,
            "framework without fitted runs": not layout.framework.fitted,
        }
        return [table[name] for name, true in holds.items() if true and name in table]


# Residuals between which 80 % of the runs lie: the logarithm of measured / modelled, at the least and at the most.
_TIME = {
    "always": (-0.08, 0.13),
    "pipeline": (-0.03, 0.05),
    "many devices": (-0.04, 0.08),
    "tensor parallelism across nodes": (-0.09, 0.12),
    "framework without fitted runs": (-0.13, 0.13),
}
_BYTES = {
    "always": (-0.10, 0.13),
    "large micro-batches": (-0.14, 0.12),
    "tensor parallelism across nodes": (-0.03, 0.04),
    "framework without fitted runs": (-0.12, 0.13),
}


def _spread(doubts: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The factors of the least and the most of a range."""
    least, most = (sum(side) for side in zip(*doubts))
    return exp(least), exp(most)


def estimate(training: Training, layout: Layout, needs: Memory | None = None) -> Estimate:
    """The time, memory and traffic of a step; `needs` is its memory, if it is known. `LookupError` if the machine has
    no such links."""
    needs = needs or memory(training, layout)
    return Estimate(training, layout, needs, *_Step(training, layout, needs).figures())


@dataclass(frozen=True)
class _Work:
    """The seconds of a micro-batch in a stage: its kernels in forward and in backward without recomputation, what is
    computed again, exposed communication within the stage, and launching."""

    forward: float
    backward: float
    again: float
    tensor: float
    context: float
    launch: float
    sharp: float

    @property
    def kernels(self) -> float:
        return self.forward + self.backward + self.again + self.tensor + self.context

    @property
    def seconds(self) -> float:
        """The kernels or their launch, whichever takes longer."""
        longer, shorter = max(self.kernels, self.launch), min(self.kernels, self.launch)
        if longer == 0:  # a stage without a layer
            return 0.0
        return float(longer * (1 + (shorter / longer) ** self.sharp) ** (1 / self.sharp))


class _Step:
    """The times of one layout, in seconds; sizes in bytes."""

    def __init__(self, training: Training, layout: Layout, needs: Memory):
        self.training, self.layout, self.model, self.needs = training, layout, training.model, needs
        self.framework: Framework = layout.framework
        self.tokens = layout.micro_batch * training.sequence / layout.context
        self.bandwidth = training.accelerator.bandwidth
        self.stages = Counter(stages_of(training, layout))  # most are equal
        self.busy = dict.fromkeys(AXES, 0.0)  # without overlap
        self.sent = dict.fromkeys(AXES, 0.0)

    def figures(self) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        """The seconds of the parts of a step, bytes sent and busy seconds by axis."""
        layout = self.layout
        count = layout.micro_batches
        works = {stage: self._work(stage) for stage in self.stages}
        slowest = max(works.values(), key=lambda work: work.seconds)
        average = sum(number * works[stage].seconds for stage, number in self.stages.items()) / layout.pipeline
        self._count_traffic(max(works, key=lambda candidate: works[candidate].seconds))
        gathered, reduced, last, after = self._data(slowest.forward, slowest.backward + slowest.again)
        sends = self._sends()
        every = gathered + reduced + sends
        parts = {
            "computation": (slowest.forward + slowest.backward) * count,
            "recomputation": slowest.again * count,
            "launch": (slowest.seconds - slowest.kernels) * count,
            "data": (gathered + reduced) * count + last + after,
            "tensor": slowest.tensor * count,
            "context": slowest.context * count,
            "pipeline": sends * count,
            "bubble": (layout.pipeline - 1) / layout.chunks * (average + every),
            "optimizer": self._optimizer(),
        }
        nodes = self.training.devices / self.training.machine.per_node
        between = self.training.machine.between
        jitter = between.jitter if between else 0.0
        parts["waiting"] = jitter * log2(max(1.0, nodes)) * sum(parts.values())
        is_short = self.needs.total > NEARLY_FULL * self.training.memory
        parts["allocator"] = self.framework.retries * sum(parts.values()) if is_short else 0.0
        return parts, self.sent, self.busy

    # ---- kernels

    def _work(self, stage: Stage) -> _Work:
        """The times of a micro-batch in a stage."""
        layout, framework = self.layout, self.framework
        forward, backward = self._layer
        head_forward, head_backward = self._head if stage.last else (0.0, 0.0)
        again = {"none": 0.0, "selective": framework.selective[0], "full": 1.0}[layout.recompute]
        accumulated = framework.accumulated * numbers_of(self.model, stage, layout.tensor)
        passes = framework.passes[layout.compiled]
        tensor, context = self._tensor(stage)[0], self._context(stage)[0]
        launched = (stage.layers + stage.last) * self._launch * (1 + again / 3)
        return _Work(
            stage.layers * forward + head_forward,
            stage.layers * backward + head_backward + passes * accumulated / self.bandwidth,
            again * stage.layers * forward,
            tensor,
            context,
            launched,
            _SHARP if self.training.nodes(layout.tensor, 1) == 1 else _SHARP_ACROSS,
        )

    @cached_property
    def _layer(self) -> tuple[float, float]:
        """The kernels of a layer in forward and backward."""
        training, layout, model = self.training, self.layout, self.model
        products = sum(training.product(*shape, layers=True) for shape in model.products(self.tokens, layout.tensor))
        moved = training.wide * self.tokens / layout.tensor * model.moved / self.bandwidth
        moved *= self.framework.passes[layout.compiled] * training.casts
        attention = self._attention
        frozen = layout.trained != "all"  # no gradients of matrices
        backward = (FROZEN if frozen else 2) * products + self._attention_backward * attention + 2 * moved / 3
        return products + attention + moved / 3, backward

    @property
    def _attention_backward(self) -> float:
        return BACKWARD if self.training.attention == "fused" else 2.0

    @cached_property
    def _attention(self) -> float:
        """Attention of a layer, forward."""
        training, layout, model = self.training, self.layout, self.model
        pairs = self.tokens * training.sequence / layout.tensor  # of positions, on this rank
        if training.attention == "eager":
            scores = self.framework.scores[layout.compiled] * pairs * model.heads / self.bandwidth
            return scores + 4 * pairs * model.heads * model.head_width / training.rate
        length = training.sequence
        reached = self.framework.attention * training.accelerator.attention * length / (length + LENGTH)
        reached *= min(1.0, model.head_width / HEAD) ** NARROW
        causal = 2 * pairs * model.heads * model.head_width
        return float(causal / (training.accelerator.peak(training.sixteen) * reached))

    @cached_property
    def _head(self) -> tuple[float, float]:
        """The head and the loss, forward and backward."""
        training, layout, model = self.training, self.layout, self.model
        product = training.product(self.tokens, model.vocabulary / layout.tensor, model.width, layers=False)
        logits = self.tokens * model.vocabulary / layout.tensor
        moved = self.framework.loss[layout.compiled] * training.wide / 2 * logits / self.bandwidth
        return product + moved / 2, 2 * product + moved / 2

    @cached_property
    def _launch(self) -> float:
        """Launching the kernels of a layer, forward and backward, and what tensor-parallel ranks wait for each other.

        Each of the 8 collectives starts when the last of its ranks has launched it. The expected delay grows with the
        logarithm of the ranks; it was found where the transfers of a pipeline, which use the host as well, cross nodes.
        """
        framework, layout = self.framework, self.layout
        nodes = self.training.nodes(layout.tensor, 1)
        seconds = framework.host[layout.compiled] + 8 * framework.across * (nodes - 1)
        if layout.pipeline > 1 and layout.tensor > 1 and layout.devices > self.training.machine.per_node:
            factor, exponent = framework.straggle
            seconds *= 1 + factor * log2(layout.tensor) ** exponent
        return seconds

    def _optimizer(self) -> float:
        layout = self.layout
        states = bytes_per_parameter(self.training, layout)
        if layout.trained != "all":
            return 0.0
        moved = states["gradients"] + 2 * (states["parameters"] + states["optimizer"])
        most = numbers_of(self.model, self._most, layout.tensor)
        return self.framework.stepped * moved * most / layout.shards_of("optimizer") / self.bandwidth

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
        layout = self.layout
        sharding, count = layout.sharding, layout.micro_batches
        forward_calls, backward_calls, once_calls = sharding.forward, sharding.backward, sharding.once
        if layout.trained != "all":  # only gathers of frozen parameters
            backward_calls, once_calls = tuple(call for call in backward_calls if call == "all_gather"), ()
        if layout.keeps_gathered:
            once_calls = (*forward_calls, "reduce_scatter", *once_calls)
            forward_calls = backward_calls = ()
        gathers = self._units(forward_calls, count)
        often = self._units(backward_calls, count)
        once = self._units(once_calls, 1)
        after = self.framework.regathered * self._units(sharding.after, 1)[1] if layout.trained == "all" else 0.0
        ahead = 1 - 1 / max(1, self._most.layers)  # the part of a direction that overlaps with that of other layers
        gathered = _exposed(gathers, forward * ahead)
        reduced = _exposed(often, backward * ahead)
        both = often[0] + once[0], often[1] + once[1]
        return gathered, reduced, _exposed(both, backward * ahead) - reduced, after

    @cached_property
    def _most(self) -> Stage:
        """The stage with the most parameters."""
        return max(self.stages, key=lambda stage: numbers_of(self.model, stage, self.layout.tensor))

    def _units(self, operations: Iterable[str], times: int) -> tuple[float, float]:
        """The seconds of operations on a layer (of the last one of them), and on all parameters of the rank."""
        edge = total = 0.0
        tensor = self.layout.tensor
        layers = self._most.layers
        ends = numbers_of(self.model, self._most, tensor) - layers * self.model.of_layer(tensor)
        for operation in operations:
            each = self._unit(operation, self.model.of_layer(tensor), times * layers)
            edge, total = each, total + layers * each + self._unit(operation, ends, times)
        return edge, total

    def _unit(self, operation: str, numbers: float, times: float) -> float:
        """An operation on some parameters, in messages of the framework's bucket."""
        layout, training = self.layout, self.training
        wide = training.wide if operation == "all_gather" else self.reduced
        size = wide * numbers
        ranks, stride = layout.shards, layout.tensor
        if operation == "all_reduce":  # of what the groups of shards do not share
            stride = layout.tensor * (layout.shards if layout.replicas > 1 else 1)
            ranks = layout.replicas if layout.sharding.owners else layout.synced
            size /= layout.shards if layout.sharding.owners else 1
        messages = max(1.0, size / self.framework.bucket) if self.framework.bucket else 1.0
        return messages * self._call("data", operation, size / messages, ranks, stride, times * messages)

    @property
    def reduced(self) -> float:
        """Bytes of a gradient in a reduction."""
        return self.framework.reduced if self.training.recipe == "mixed" else 4.0

    def _tensor(self, stage: Stage) -> tuple[float, dict[str, float]]:
        """Exposed seconds per micro-batch, and calls by operation: of each layer, and of embedding and head without a
        pipeline. Recomputation repeats what forward needs, which is all but a layer's last reduce-scatter."""
        layout, ends = self.layout, self.layout.pipeline == 1
        size = self.training.wide * self.tokens * self.model.width
        again = layout.recompute == "full"
        calls = {
            "all_gather": (4.0 + 2 * again) * stage.layers + 2 * ends,
            "reduce_scatter": (4.0 + again) * stage.layers + ends,
        }
        if layout.tensor == 1:
            return 0.0, calls
        hidden = self.framework.hidden[layout.asynchronous]
        seconds = self._seconds(calls, size, layout.tensor, 1)
        return (1 - hidden) * seconds + sum(calls.values()) * self.framework.call, calls

    def _context(self, stage: Stage) -> tuple[float, dict[str, float]]:
        """Exposed seconds per micro-batch, and calls by operation: keys and values of the whole sequence."""
        layout = self.layout
        calls = {
            "all_gather": (1.0 + (layout.recompute != "none")) * stage.layers,
            "reduce_scatter": 1.0 * stage.layers,
        }
        if layout.context == 1:
            return 0.0, calls
        return self._seconds(calls, self._shared, layout.context, layout.tensor), calls

    def _seconds(self, calls: Mapping[str, float], size: float, ranks: int, stride: int) -> float:
        return sum(times * self.training.seconds(operation, size, ranks, stride) for operation, times in calls.items())

    @property
    def _shared(self) -> float:
        """The bytes of keys and values that context-parallel ranks share in a layer."""
        layout = self.layout
        return self.training.wide * self.tokens * layout.context * self.model.keys_and_values / layout.tensor

    def _count_traffic(self, stage: Stage) -> None:
        """Adds what a rank of a stage sends per step for tensor and context parallelism."""
        layout, count = self.layout, self.layout.micro_batches
        size = self.training.wide * self.tokens * self.model.width
        for operation, times in self._tensor(stage)[1].items():
            self._call("tensor", operation, size, layout.tensor, 1, times * count)
        for operation, times in self._context(stage)[1].items():
            self._call("context", operation, self._shared, layout.context, layout.tensor, times * count)

    def _sends(self) -> float:
        """Per micro-batch: a stage's outputs, of which each tensor-parallel rank sends a part, and their gradients. Of
        two stages, each sends one of them and waits for the other."""
        layout = self.layout
        if layout.pipeline == 1:
            return 0.0
        size = self.training.wide * self.tokens * self.model.width / layout.tensor
        stride = layout.devices // layout.pipeline
        seconds = self.training.send(size, stride)
        self.busy["pipeline"] += 2 * layout.chunks * seconds * layout.micro_batches
        self.sent["pipeline"] += min(2, layout.pipeline - 1) * layout.chunks * size * layout.micro_batches
        return layout.chunks * (2 * seconds + self.training.crowded(layout))


def _exposed(units: tuple[float, float], computation: float) -> float:
    """The exposed part of communication: the seconds of one unit, and what of the rest exceeds the computation."""
    edge, total = units
    return edge + max(0.0, total - edge - computation)
