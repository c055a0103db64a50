"""Trains a small GPT on one device, or on 8 ranks: 2 data × 2 pipeline × 2 tensor.

torchrun --nproc-per-node=1 mesh_training.py   # OneDevice
torchrun --nproc-per-node=8 mesh_training.py   # Training, which you write

The parts are those of labs 13 and 14, and they work. Each gets the group that it communicates in; with None, it is the
part of a model on one device. Between the blocks, each rank of a tensor group has its own positions.
"""

from collections import deque

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

BLOCKS, HEADS, WIDTH, VOCABULARY, POSITIONS = 2, 4, 32, 64, 16
SAMPLES, MICRO_BATCHES, STEPS = 2, 3, 12  # samples of a micro-batch; micro-batches of a replica per step
DATA, PIPELINE, TENSOR = 2, 2, 2  # rank = (data × PIPELINE + pipeline) × TENSOR + tensor

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


# ---- tensor and sequence parallelism (lab 14): the first dimension is that of the positions


def gathered(x, group):
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    all_gather(out, x.contiguous(), group=group)
    return out


def scattered(x, group):
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    reduce_scatter(out, x.contiguous(), group=group)
    return out


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return scattered(gradient, ctx.group), None


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return scattered(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gathered(gradient, ctx.group), None


def gather(x, group):
    """From the positions of this rank to all positions."""
    return x if group is None else Gather.apply(x, group)


def scatter(x, group):
    """From partial sums for all positions to the sums for the positions of this rank."""
    return x if group is None else Scatter.apply(x, group)


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, group):
        most = logits.max(dim=1).values
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        exponentials = (logits - most[:, None]).exp()
        first = group.rank() * logits.shape[1]
        mine = (targets >= first) & (targets < first + logits.shape[1])
        index = (targets - first).clamp(0, logits.shape[1] - 1)[:, None]
        of_target = torch.where(mine, logits.gather(1, index)[:, 0] - most, 0.0)
        sums = torch.stack([exponentials.sum(dim=1), of_target])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(exponentials / sums[0][:, None], mine, index)
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx, gradient):
        softmax, mine, index = ctx.saved_tensors
        of_logits = softmax.scatter_add(1, index, -mine[:, None].to(softmax.dtype))
        return gradient * of_logits / len(softmax), None, None


# ---- the GPT: what a rank of a tensor group has of each layer


SPLIT = {  # the dimension that is split over a tensor group, by the last words of a parameter's name
    **{"vocabulary.weight": 0, "positions": 0},
    **{"qkv.weight": 0, "qkv.bias": 0, "out.weight": 1, "up.weight": 0, "up.bias": 0, "down.weight": 1},
}


def split_dimension(name):
    """The dimension of the parameter `blocks.0.up.weight` that is split; None if each rank has all of it."""
    return SPLIT.get(".".join(name.split(".")[-2:]))


def part_of(name, whole, rank, ranks):
    """A copy of what the rank of a tensor group stores of a parameter."""
    dimension = split_dimension(name)
    if dimension is None:
        return whole.clone()
    if "qkv" in name:  # the heads are split, each with its queries, keys and values
        return whole.unflatten(0, (3, -1)).chunk(ranks, dim=1)[rank].flatten(0, 1).clone()
    return whole.chunk(ranks, dim=dimension)[rank].clone()


def ranks_of(group):
    return 1 if group is None else group.size()


class Vocabulary(nn.Module):
    """A vector for each token: the first stage looks tokens up, the last one computes logits with the same vectors."""

    def __init__(self, group):
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(torch.randn(VOCABULARY // ranks_of(group), WIDTH) / WIDTH**0.5)

    def forward(self, tokens):
        """(positions, samples) to (this rank's positions, samples, width)."""
        if self.group is not None:
            tokens = tokens - self.group.rank() * len(self.weight)
        mine = (tokens >= 0) & (tokens < len(self.weight))
        vectors = functional.embedding(tokens.clamp(0, len(self.weight) - 1), self.weight)
        return scatter(vectors * mine[..., None], self.group)

    def loss(self, x, targets):
        """The mean over all positions and samples, on every rank of the tensor group."""
        logits = (gather(x, self.group) @ self.weight.T).flatten(0, 1)
        if self.group is None:
            return functional.cross_entropy(logits, targets.flatten())
        return CrossEntropy.apply(logits, targets.flatten(), self.group)


class Block(nn.Module):
    """Attention and an MLP, with the heads and the hidden features of this rank."""

    def __init__(self, group):
        super().__init__()
        ranks = ranks_of(group)
        self.group, self.heads = group, HEADS // ranks
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH // ranks), nn.Linear(WIDTH // ranks, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH // ranks), nn.Linear(4 * WIDTH // ranks, WIDTH)

    def forward(self, x):
        """(this rank's positions, samples, width) to the same."""
        mixed = self.attention(gather(self.norm1(x), self.group))
        x = x + scatter(mixed @ self.out.weight.T, self.group) + self.out.bias
        hidden = functional.gelu(self.up(gather(self.norm2(x), self.group)))
        return x + scatter(hidden @ self.down.weight.T, self.group) + self.down.bias

    def attention(self, x):
        positions, samples, _ = x.shape
        q, k, v = self.qkv(x).view(positions, samples, 3, self.heads, -1).permute(2, 1, 3, 0, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.permute(2, 0, 1, 3).flatten(2)


class Stage(nn.Module):
    """The blocks with these numbers; the first stage also has the embedding, the last one the logits. Parameters have
    the names of the whole model."""

    def __init__(self, blocks, first, last, group):
        super().__init__()
        self.first, self.last = first, last
        if first or last:
            self.vocabulary = Vocabulary(group)
        if first:
            self.positions = nn.Parameter(torch.randn(POSITIONS // ranks_of(group), 1, WIDTH) / WIDTH**0.5)
        self.blocks = nn.ModuleDict({str(number): Block(group) for number in blocks})
        if last:
            self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        """Tokens, or the output of the stage before, to the input of the next stage, or of `loss`."""
        x = self.vocabulary(x) + self.positions if self.first else x
        for block in self.blocks.values():
            x = block(x)
        return self.norm(x) if self.last else x

    def loss(self, output, targets):
        """The mean loss of a micro-batch, (positions, samples), in the last stage."""
        return self.vocabulary.loss(output, targets)


# ---- a pipeline (lab 14) and ZeRO (lab 13)


def one_f_one_b(stage, count, shape, inputs, loss_of, group):
    """Adds up the gradients of `count` micro-batches. `shape` is that of what a rank sends; `inputs` are None except in
    the first stage, `loss_of(output, number)` is None except in the last one."""
    rank, ranks = group.rank(), group.size()
    waiting, sends = deque(), []

    def received(source):
        x = torch.empty(shape)
        dist.recv(x, dist.get_global_rank(group, source), group=group)
        return x

    def send(x, to):
        sends.append(dist.isend(x, dist.get_global_rank(group, to), group=group))

    def forward(number):
        x = inputs[number] if rank == 0 else received(rank - 1).requires_grad_()
        y = stage(x)
        if rank == ranks - 1:
            y = loss_of(y, number)
        else:
            send(y.detach(), rank + 1)
        waiting.append((x, y))

    def backward():
        x, y = waiting.popleft()
        y.backward(None if rank == ranks - 1 else received(rank + 1))
        if rank > 0:
            send(x.grad, rank - 1)

    warm_up = min(ranks - rank - 1, count)
    for number in range(warm_up):
        forward(number)
    for number in range(warm_up, count):
        forward(number)
        backward()
    for _ in range(warm_up):
        backward()
    for work in sends:
        work.wait()


class ZeRO1:
    """Every rank of the group updates a shard of each parameter. `step` adds up the gradients of the group's ranks, and
    frees them; it does not divide them."""

    def __init__(self, parameters, make_optimizer, group):
        self.parameters, self.group = list(parameters), group
        self.shards = [parameter.data.chunk(group.size())[group.rank()] for parameter in self.parameters]  # views
        self.optimizer = make_optimizer(self.shards)

    def step(self):
        for parameter, shard in zip(self.parameters, self.shards):
            shard.grad = torch.empty_like(shard)
            reduce_scatter(shard.grad, parameter.grad, group=self.group)
            parameter.grad = None
        self.optimizer.step()
        for parameter, shard in zip(self.parameters, self.shards):
            shard.grad = None
            all_gather(parameter.data, shard.clone(), group=self.group)


# ---- the training


class OneDevice:
    """Trains the whole GPT with the samples of all replicas."""

    def __init__(self, parameters, make_optimizer):
        self.stage = Stage(range(BLOCKS), True, True, None)
        self.stage.load_state_dict(parameters)
        self.optimizer = make_optimizer(self.stage.parameters())

    def step(self, tokens, targets):
        """One update. Returns the mean loss of all micro-batches."""
        self.optimizer.zero_grad()
        losses = [self.stage.loss(self.stage(x), y) for x, y in zip(tokens, targets)]
        loss = torch.stack(losses).mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class Training:
    """Trains the GPT on all ranks of the mesh, as `OneDevice` does."""

    def __init__(self, parameters, make_optimizer):
        """`parameters` are those of the whole GPT by name, equal on all ranks: store copies of this rank's parts, and
        shard the state of the optimizer over the replicas."""
        ...

    def step(self, tokens, targets):
        """One update from the samples of all replicas. Returns their mean loss, on every rank.

        `tokens` and `targets` are those of this rank's replica, (micro-batches, positions, samples). Only the ranks of
        the first stage get tokens, and only those of the last one targets; the others get None.
        """
        ...

    def parameters(self):
        """What this rank stores, by the names of the whole model."""
        return dict(self.stage.named_parameters())


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.003, weight_decay=0.01, eps=1e-5)


def main():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    parameters = Stage(range(BLOCKS), True, True, None).state_dict()
    starts = torch.randint(VOCABULARY, (STEPS, DATA * MICRO_BATCHES, 1, SAMPLES))
    text = (starts + 3 * torch.arange(POSITIONS + 1)[:, None]) % VOCABULARY  # each token follows from the one before
    training = (OneDevice if ranks == 1 else Training)(parameters, adam)
    del parameters
    replica, stage = rank // (PIPELINE * TENSOR), rank // TENSOR % PIPELINE
    for step in range(STEPS):
        own = text[step] if ranks == 1 else text[step].chunk(DATA)[replica]
        tokens, targets = own[:, :-1], own[:, 1:]
        first, last = ranks == 1 or stage == 0, ranks == 1 or stage == PIPELINE - 1
        loss = training.step(tokens if first else None, targets if last else None)
        if rank == 0 and step % 3 == 0:
            print(f"step {step}: loss {float(loss):.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
