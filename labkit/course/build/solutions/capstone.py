"""`Training` of mesh_training.py: data parallelism with ZeRO-1, a pipeline, and tensor parallelism on one mesh."""

import torch
import torch.distributed as dist

from labkit.course.build.starters.mesh_training import (
    BLOCKS,
    DATA,
    MICRO_BATCHES,
    PIPELINE,
    POSITIONS,
    SAMPLES,
    TENSOR,
    WIDTH,
    Stage,
    ZeRO1,
    one_f_one_b,
    part_of,
    split_dimension,
)


def groups():
    """The groups of this rank along data, pipeline and tensor. Every rank creates all of them, in the same order."""
    mesh, own = torch.arange(DATA * PIPELINE * TENSOR).view(DATA, PIPELINE, TENSOR), []
    for axis in range(mesh.dim()):
        for line in mesh.movedim(axis, -1).flatten(0, -2).tolist():
            group = dist.new_group(line)
            if dist.get_rank() in line:
                own.append(group)
    return own


class Training:
    """Trains the GPT on all ranks of the mesh, as `OneDevice` does."""

    def __init__(self, parameters, make_optimizer):
        self.data, self.pipeline, self.tensor = groups()
        number, blocks = self.pipeline.rank(), BLOCKS // PIPELINE
        first, last = number == 0, number == PIPELINE - 1
        self.stage = Stage(range(number * blocks, (number + 1) * blocks), first, last, self.tensor)
        rank, ranks = self.tensor.rank(), self.tensor.size()
        self.stage.load_state_dict(
            {name: part_of(name, parameters[name], rank, ranks) for name in self.stage.state_dict()}
        )
        self.optimizer = ZeRO1(self.stage.parameters(), make_optimizer, self.data)

    def step(self, tokens, targets):
        losses = []

        def loss_of(output, number):
            losses.append(self.stage.loss(output, targets[number]) / (MICRO_BATCHES * DATA))
            return losses[-1]

        shape = (POSITIONS // TENSOR, SAMPLES, WIDTH)
        one_f_one_b(self.stage, MICRO_BATCHES, shape, tokens, loss_of, self.pipeline)
        for name, parameter in self.stage.named_parameters():
            if split_dimension(name) is None:  # its gradient is that of this rank's positions
                dist.all_reduce(parameter.grad, group=self.tensor)
        dist.all_reduce(self.stage.vocabulary.weight.grad, group=self.pipeline)  # lookup, and logits
        self.optimizer.step()
        loss = torch.stack(losses).sum().detach() if losses else torch.zeros(())
        for group in (self.pipeline, self.data):
            dist.all_reduce(loss, group=group)
        return loss

    def parameters(self):
        """What this rank stores, by the names of the whole model."""
        return dict(self.stage.named_parameters())
