"""A mixed-precision step with fp32 master weights and loss scaling, forward that recomputes what costs least, and the
peak of a memory snapshot."""

from itertools import combinations, pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint


class MixedPrecision:
    def __init__(self, model, make_optimizer, scale):
        self.model, self.scale = model, scale
        self.masters = [nn.Parameter(parameter.detach()) for parameter in model.parameters()]
        model.half()  # new tensors; the masters keep the old ones
        self.optimizer = make_optimizer(self.masters)

    def step(self, loss):
        (loss * self.scale).backward()
        gradients = [parameter.grad for parameter in self.model.parameters()]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        self.model.zero_grad()
        dist.all_reduce(flat)  # an overflow of one rank reaches all of them
        if not flat.isfinite().all():
            self.scale /= 2
            return
        flat = flat.float() / (self.scale * dist.get_world_size())
        for master, part in zip(self.masters, flat.split([master.numel() for master in self.masters])):
            master.grad = part.view_as(master)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for parameter, master in zip(self.model.parameters(), self.masters):
                parameter.copy_(master)


def forward(blocks, x, limit):
    always = len(blocks) * x.nbytes  # the input of each block but the first, and the output of the last one
    costs = [stored_and_recomputed(block, len(x)) for block in blocks]
    best, least = set(), None
    for count in range(len(blocks) + 1):
        for kept in combinations(range(len(blocks)), count):
            stored = always + sum(costs[index][0] for index in kept)
            again = sum(operations for index, (_, operations) in enumerate(costs) if index not in kept)
            if stored <= limit and (least is None or again < least):
                best, least = set(kept), again
    for index, block in enumerate(blocks):
        x = block(x) if index in best else checkpoint(block, x, use_reentrant=False)
    return x


def at_the_peak(trace):
    held, used, peak, lines = {}, 0, 0, {}
    for event in trace:
        if event["action"] == "alloc":
            held[event["addr"]] = event
            used += event["size"]
        elif event["action"] == "free_completed" and event["addr"] in held:
            used -= held.pop(event["addr"])["size"]
        if used > peak:
            peak, lines = used, {}
            for block in held.values():
                lines[line_of(block)] = lines.get(line_of(block), 0) + block["size"]
    return peak, lines


def line_of(event):
    own = [frame["line"] for frame in event["frames"] if frame["filename"].endswith("train.py")]
    return own[0] if own else None  # frames begin with the innermost call


def stored_and_recomputed(block, tokens):
    """Bytes that the block stores for backward beyond its input, and operations to compute them again."""
    stored = operations = 0
    for layer, following in pairwise(block):
        if isinstance(layer, nn.Linear):
            operations += 2 * tokens * layer.in_features * layer.out_features
            stored += (8 if isinstance(following, nn.GELU) else 4) * tokens * layer.out_features
    return stored, operations
