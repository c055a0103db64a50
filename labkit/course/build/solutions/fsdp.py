"""One unit of FSDP: gathers its parameters, computes, frees them, and reduce-scatters their gradients."""

import torch
import torch.distributed as dist
from torch import nn

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Unit(nn.Module):
    def __init__(self, layer):
        super().__init__()
        flat = torch.cat([parameter.data.flatten() for parameter in layer.parameters()])
        self.shapes = {name: parameter.shape for name, parameter in layer.named_parameters()}
        self.shard = nn.Parameter(flat.chunk(dist.get_world_size())[dist.get_rank()].clone())
        self.layer = [layer.to("meta")]  # the code without its parameters; in a list, it is no submodule

    def forward(self, x):
        return GatherAndCompute.apply(x, self.shard, self)

    def gather(self):
        flat = self.shard.new_empty(self.shard.numel() * dist.get_world_size())
        all_gather(flat, self.shard.data)
        return flat

    def compute(self, x, flat):
        parts = flat.split([shape.numel() for shape in self.shapes.values()])
        views = {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts)}
        return torch.func.functional_call(self.layer[0], views, x)


class GatherAndCompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, unit):
        ctx.save_for_backward(x)
        ctx.unit = unit
        return unit.compute(x, unit.gather())  # nothing refers to the gathered parameters afterwards

    @staticmethod
    def backward(ctx, gradient):
        x, flat = ctx.saved_tensors[0].detach().requires_grad_(), ctx.unit.gather().requires_grad_()
        with torch.enable_grad():
            y = ctx.unit.compute(x, flat)
        of_x, of_flat = torch.autograd.grad(y, (x, flat), gradient)
        of_shard = torch.empty_like(ctx.unit.shard)
        reduce_scatter(of_shard, of_flat)
        return of_x, of_shard / dist.get_world_size(), None
