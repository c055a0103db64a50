"""ZeRO with Adam: every rank updates a shard of each parameter, and in stage 2 keeps only that shard of its gradient.

The first dimension of every parameter is a multiple of the number of ranks.
"""

import torch
import torch.distributed as dist

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class ZeRO1:
    def __init__(self, model, make_optimizer):
        self.parameters = list(model.parameters())
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.shards = [parameter.data.chunk(ranks)[rank] for parameter in self.parameters]  # views, not copies
        self.optimizer = make_optimizer(self.shards)

    def step(self):
        for parameter, shard in zip(self.parameters, self.shards):
            shard.grad = torch.empty_like(shard)
            reduce_scatter(shard.grad, parameter.grad)
            shard.grad /= dist.get_world_size()
        self.optimizer.step()
        for parameter, shard in zip(self.parameters, self.shards):
            shard.grad = None
            all_gather(parameter.data, shard.clone())


class ZeRO2:
    def __init__(self, model, make_optimizer):
        self.parameters = list(model.parameters())
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.shards = {parameter: parameter.data.chunk(ranks)[rank] for parameter in self.parameters}
        self.optimizer = make_optimizer(self.shards.values())
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.keep_shard)

    def keep_shard(self, parameter):
        shard = self.shards[parameter]
        shard.grad = torch.empty_like(shard)
        reduce_scatter(shard.grad, parameter.grad)
        shard.grad /= dist.get_world_size()
        parameter.grad = None

    def step(self):
        self.optimizer.step()
        for parameter, shard in self.shards.items():
            shard.grad = None
            all_gather(parameter.data, shard.clone())
