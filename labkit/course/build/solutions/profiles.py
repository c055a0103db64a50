"""slow_training.py without its five faults."""

import inspect

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
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))


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
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.model = Model()
        self.model.load_state_dict(parameters)
        self.optimizer = torch.optim.SGD(self.model.parameters(), RATE, MOMENTUM)

    def load(self, starts):
        """A micro-batch: the bytes from each start on, and those that follow each; both (samples, positions), int64."""
        tokens = torch.stack([self.text[start : start + POSITIONS + 1] for start in starts]).long()
        return tokens[:, :-1], tokens[:, 1:]

    def step(self, batches):
        """One update from all micro-batches of all ranks. Returns the mean loss of this rank."""
        self.optimizer.zero_grad()
        mean = 0.0
        for inputs, targets in batches:
            logits = self.model(inputs)
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / len(batches)
            loss.backward()
            mean += loss.detach()
        self.average_gradients()
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        return mean

    def average_gradients(self):
        """Replaces each gradient by its mean over the ranks."""
        gradients = [parameter.grad for parameter in self.model.parameters()]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
            gradient.copy_(mean.view_as(gradient))

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
