"""Bytes that a rank stores under a layout, by owner."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.analysis.theory.states import RECIPES, States
from labkit.prediction.scale.layouts import Layout
from labkit.prediction.scale.training import Training


@dataclass(frozen=True)
class Memory:
    """Bytes of the rank that stores the most: its model states, activations and communication buffers."""

    states: States
    activations: float
    communication: float

    @property
    def total(self) -> float:
        """The sum of all."""
        return self.states.total + self.activations + self.communication

    @property
    def owners(self) -> dict[str, float]:
        """The bytes by owner, as in a measured run."""
        return {**vars(self.states), "activations": self.activations, "communication": self.communication}


def memory(training: Training, layout: Layout) -> Memory:
    """The memory of the rank that stores the most, in the first or the last stage of a pipeline.

    States: the bytes per parameter of `RECIPES`, divided by the shards (Rajbhandari et al. 2020, section 5). A stage
    stores the activations of as many micro-batches as there are stages from it to the last one (1F1B, Narayanan et al.
    2021, section 2.2.1); with recomputation, the inputs of its layers and one whole layer.
    """
    first = _of_stage(training, layout, 0)
    if layout.pipeline == 1:
        return first
    return max(first, _of_stage(training, layout, layout.pipeline - 1), key=lambda one: one.total)


def layers_of(training: Training, layout: Layout, stage: int) -> int:
    """The layers of a stage; the first stages have one more if they do not divide evenly."""
    each, more = divmod(training.model.layers, layout.pipeline)
    return each + (stage < more)


def numbers_of(training: Training, layout: Layout, stage: int) -> int:
    """The parameters of a rank of a stage, before they are sharded; a tied matrix is on the first and the last one."""
    model, tensor, last = training.model, layout.tensor, layout.pipeline - 1
    ends = model.before(tensor) * (stage == 0) + model.after(tensor) * (stage == last)
    tied = model.tied and stage == 0 == last
    return layers_of(training, layout, stage) * model.of_layer(tensor) + ends - tied * (model.table // tensor)


def _of_stage(training: Training, layout: Layout, stage: int) -> Memory:
    model, tensor, wide = training.model, layout.tensor, training.wide
    layers = layers_of(training, layout, stage)
    is_first, is_last = stage == 0, stage == layout.pipeline - 1
    numbers = numbers_of(training, layout, stage)
    states = States(
        *(
            each * numbers / (layout.shards if owner in layout.sharding.owners else 1)
            for owner, each in RECIPES[training.recipe].items()
        )
    )
    gradient = RECIPES[training.recipe]["gradients"]
    copies, gathered, reduced = layout.sharding.buffers
    unit = max(model.of_layer(tensor), model.before(tensor) * is_first, model.after(tensor) * is_last)
    buffers = copies * gradient * numbers + unit * (gathered * wide + reduced * gradient)

    tokens = layout.micro_batch * training.sequence / layout.context
    live = min(layout.micro_batches, layout.pipeline - stage)
    whole = model.layer_activations(tokens, training.sequence, tensor, wide, training.attention)
    whole += wide * tokens * model.keys_and_values * (layout.context - 1) / tensor  # those of the other ranks
    stored = whole
    if layout.recompute:
        stored = model.layer_input(tokens, tensor, wide)
    activations = live * layers * stored + (whole if layout.recompute else 0)
    if is_last:
        activations += model.head_activations(tokens, tensor, wide)
    return Memory(states, activations, buffers)
