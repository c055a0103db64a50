"""Weights of two trainers, sharded by FSDP2, for two samplers in a tensor-parallel layout."""

import torch
import torch.distributed as dist


def hand_over(matrices, shards):
    rank, parts = dist.get_rank(), {}
    for name, (rows, columns, split) in matrices.items():
        if rank < 2:
            shard = shards[name].bfloat16()
            if split == "column":  # the sampler needs exactly the rows of this trainer
                dist.send(shard, 2 + rank)
            else:
                for sampler, block in enumerate(shard.chunk(2, dim=1)):
                    dist.send(block.contiguous(), 2 + sampler)
        elif split == "column":
            parts[name] = torch.empty(rows // 2, columns, dtype=torch.bfloat16)
            dist.recv(parts[name], rank - 2)
        else:
            parts[name] = torch.empty(rows, columns // 2, dtype=torch.bfloat16)
            for trainer, block in enumerate(parts[name].chunk(2)):  # the first has one row more if rows is odd
                dist.recv(block, trainer)
    return parts
