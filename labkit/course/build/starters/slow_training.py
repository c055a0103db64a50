"""Trains a small language model on CPU ranks. What it learns is right; five faults make it slow.

torchrun --nproc-per-node=2 slow_training.py
"""

import inspect
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

LAYERS, HEADS, WIDTH, POSITIONS = 2, 4, 64, 256
MICRO_BATCHES, SAMPLES, STEPS = 4, 4, 10  # per rank and step; samples per micro-batch
RATE, MOMENTUM, MAX_NORM = 0.1, 0.9, 0.5


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        samples, positions, _ = x.shape
        q, k, v = self.project(x).view(samples, positions, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
        later = torch.ones(positions, positions).triu(1) == 1
        weights = scores.masked_fill(later, -math.inf).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    """Attention and an MLP, each after a norm and added to its input."""

    def __init__(self):
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(WIDTH), Attention())
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


class Model(nn.Module):
    """Predicts each byte of a text from those before it."""

    def __init__(self):
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(POSITIONS, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, tokens):
        return self.head(self.blocks(self.bytes(tokens) + self.positions))


class Training:
    """Training on `text`, the bytes of this rank, from parameters that are equal on all ranks."""

    def __init__(self, text, parameters):
        self.text = text
        self.model = Model()
        self.model.load_state_dict(parameters)
        self.optimizer = torch.optim.SGD(self.model.parameters(), RATE, MOMENTUM)

    def load(self, starts):
        """A micro-batch: the bytes from each start on, and those that follow each; both (samples, positions), int64."""
        samples = []
        for start in starts:
            tokens = [torch.tensor(byte) for byte in self.text[start : start + POSITIONS + 1]]
            samples.append(torch.stack(tokens))
        tokens = torch.stack(samples)
        return tokens[:, :-1], tokens[:, 1:]

    def step(self, batches):
        """One update from all micro-batches of all ranks. Returns the mean loss of this rank."""
        self.optimizer.zero_grad()
        mean = 0.0
        for inputs, targets in batches:
            logits = self.model(inputs)
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / len(batches)
            loss.backward()
            self.average_gradients()
            mean += loss.item()
        self.clip_gradients()
        self.optimizer.step()
        return mean

    def average_gradients(self):
        """Replaces each gradient by its mean over the ranks."""
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    def clip_gradients(self):
        """Scales the gradients so that the norm of all of them is at most MAX_NORM."""
        squares = [parameter.grad.square().sum().item() for parameter in self.model.parameters()]
        norm = math.sqrt(sum(squares))
        if norm > MAX_NORM:
            for parameter in self.model.parameters():
                parameter.grad *= MAX_NORM / norm

    def parameters(self):
        """The parameters as a single device would save them."""
        return self.model.state_dict()


def main():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    text = inspect.getsource(functional).encode()  # a text that every installation has
    text = text[rank * len(text) // ranks : (rank + 1) * len(text) // ranks]
    torch.manual_seed(0)
    training = Training(text, Model().state_dict())
    torch.manual_seed(1 + rank)
    for step in range(STEPS):
        starts = torch.randint(len(text) - POSITIONS, (MICRO_BATCHES, SAMPLES)).tolist()
        loss = training.step([training.load(some) for some in starts])
        if rank == 0 and step % 3 == 0:
            print(f"step {step}: loss {float(loss):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
