"""A small GPT that generates with a KV cache: whole, or split over ranks by heads and hidden units (tensor parallel).

As a script, each rank samples with a model that is sharded by FSDP2: torchrun --nproc-per-node=2 sampler.py alone
"""

import sys
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

VOCABULARY, WIDTH, HEADS, HEAD_WIDTH, CONTEXT = 256, 512, 8, 64, 192


class Layer(nn.Module):
    """Attention and MLP. Each of `ranks` has its share of the heads, and of the hidden units of the MLP."""

    def __init__(self, kv_heads, ranks):
        super().__init__()
        self.ranks = ranks
        own, own_kv = HEADS * HEAD_WIDTH // ranks, kv_heads * HEAD_WIDTH // ranks
        self.query = nn.Linear(WIDTH, own, bias=False)  # split by columns: each output needs the whole input
        self.key = nn.Linear(WIDTH, own_kv, bias=False)
        self.value = nn.Linear(WIDTH, own_kv, bias=False)
        self.merge = nn.Linear(own, WIDTH, bias=False)  # split by rows: the outputs are partial sums
        self.up = nn.Linear(WIDTH, 4 * WIDTH // ranks, bias=False)
        self.down = nn.Linear(4 * WIDTH // ranks, WIDTH, bias=False)

    def forward(self, x, cache, seen):
        """x: (batch, new positions, width). `seen` positions are in the cache, which has keys and values."""
        x = x + self.summed(self.merge(self.attend(layer_norm(x, (WIDTH,)), cache, seen)))
        return x + self.summed(self.down(gelu(self.up(layer_norm(x, (WIDTH,))))))

    def attend(self, x, cache, seen):
        query, key, value = (
            project(x).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        if cache is not None:
            end = seen + x.shape[1]
            cache[0, :, :, seen:end], cache[1, :, :, seen:end] = key, value
            key, value = cache[:, :, :, :end]
        attended = scaled_dot_product_attention(query, key, value, is_causal=seen == 0, enable_gqa=True)
        return attended.transpose(1, 2).flatten(2)

    def summed(self, partial):
        """The sum of the partial sums of all ranks."""
        if self.ranks > 1:
            dist.all_reduce(partial)
        return partial


class GPT(nn.Module):
    """Bytes to the logits of the next byte. `kv_heads` < 8: several heads share a key and a value."""

    def __init__(self, layers=4, kv_heads=HEADS, ranks=1):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Layer(kv_heads, ranks) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.kv_heads = kv_heads // ranks

    def new_cache(self, batch):
        """For each layer the keys and values of all positions: (2, batch, heads, positions, head width)."""
        return [torch.zeros(2, batch, self.kv_heads, CONTEXT, HEAD_WIDTH) for _ in self.layers]

    def forward(self, tokens, caches=None, seen=0):
        """tokens: (batch, new positions), after `seen` ones that are in the caches. Returns (batch, vocabulary)."""
        x = self.tokens(tokens) + self.positions(torch.arange(seen, seen + tokens.shape[1]))
        for layer, cache in zip(self.layers, caches or [None] * len(self.layers)):
            x = layer(x, cache, seen)
        return self.head(layer_norm(x[:, -1], (WIDTH,)))


@torch.no_grad()
def generate(model, prompt, count, cached=True):
    """prompt: (batch, positions). Returns the `count` tokens that follow, (batch, count): always the likeliest one."""
    caches = model.new_cache(len(prompt)) if cached else None
    tokens, new, seen = prompt, prompt, 0
    for _ in range(count):
        best = model(new, caches, seen).argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, best], dim=1)
        new, seen = (best, tokens.shape[1] - 1) if cached else (tokens, 0)
    return tokens[:, prompt.shape[1] :]


@torch.no_grad()
def seconds(model, batch, new=1, seen=0, count=5):
    """Median time of a forward of `new` tokens of each sequence, after `seen` ones; these are in a cache, if any."""
    caches, tokens = model.new_cache(batch) if seen else None, torch.randint(VOCABULARY, (batch, new))
    times = []
    for _ in range(count):
        began = time.perf_counter()
        model(tokens, caches, seen)
        times.append(time.perf_counter() - began)
    return median(times)


# ---- as a script: each rank samples with a model whose weights are sharded (FSDP2), until its own text ends


def sample(model, length, together):
    """Generates `length` tokens. `together`: computes on, for nothing, until all ranks have theirs."""
    tokens, made = torch.zeros(1, 1, dtype=torch.long), 0
    while True:
        unfinished = torch.tensor(float(made < length))
        if together:
            dist.all_reduce(unfinished)
        if not unfinished:
            return made
        with torch.no_grad():
            best = model(tokens).argmax(-1, keepdim=True)  # gathers the weights of each layer from all ranks
        tokens, made = torch.cat([tokens, best], dim=1), made + 1


def main(how):
    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model = GPT(layers=1)
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    length = 3 + 3 * rank  # in reality the text ends when the model says so
    made = sample(model, length, how == "together")
    print(f"rank {rank}: {length} tokens wanted, {made} forwards", flush=True)
    reward = torch.tensor(float(rank))
    dist.all_reduce(reward)  # the next part of the program, such as a training step
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
