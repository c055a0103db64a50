"""Bytes that a rank stores under a layout, by owner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from labkit.analysis.theory.states import RECIPES, States
from labkit.prediction.scale.layouts import Layout, Stage, stages
from labkit.prediction.scale.model import Model
from labkit.prediction.scale.training import Training

_CHUNKS = 8  # of the logits, with a chunked loss (torchtune's default)
_FOUR_BITS = 0.5 + 0.127 / 8  # bytes of a parameter
_PREFETCHED = 2  # layers whose inputs are on the device, if those of all others wait on the host


def stages_of(training: Training, layout: Layout) -> tuple[Stage, ...]:
    """The stages of a layout."""
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
        """The sum of all."""
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
    states = States(
        *(
            bytes_of[owner] * numbers / (layout.shards if owner in layout.sharding.owners else 1)
            for owner in ("parameters", "gradients", "optimizer")
        )
    )
    if layout.trained == "qlora":  # embedding and head are not quantized
        ends = numbers - stage.layers * model.of_layer(tensor)
        more = (wide - _FOUR_BITS) * ends / (layout.shards if "parameters" in layout.sharding.owners else 1)
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
