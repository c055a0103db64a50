"""A plan for a block of attention whose input and output are sharded along the positions."""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def parallelize(block, mesh):
    sequence = 1  # the dimension of the positions in x
    plan = {
        "norm": SequenceParallel(sequence_dim=sequence),
        "attention": PrepareModuleInput(input_layouts=Shard(sequence), desired_input_layouts=Replicate()),
        "attention.w1": ColwiseParallel(),  # query, key and value
        "attention.w2": ColwiseParallel(),
        "attention.w3": ColwiseParallel(),
        "attention.w4": RowwiseParallel(output_layouts=Shard(sequence)),  # the output
    }
    parallelize_module(block, mesh, plan)
