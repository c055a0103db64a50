"""A training step with everything that holds memory besides a model: a frozen teacher, averages of the weights, a data
set."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, STEPS = 256, 6


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


def main() -> None:
    model, teacher = mlp(), mlp().eval().requires_grad_(False)
    average = copy.deepcopy(model).requires_grad_(False)
    slow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    history = [torch.zeros(1000) for _ in range(3)]
    data = TensorDataset(torch.randn(8 * STEPS, 64), torch.randint(0, 10, (8 * STEPS,)))
    optimizer = torch.optim.Adam(model.parameters())
    for x, y in DataLoader(data, batch_size=8):
        with torch.no_grad():
            wanted = teacher(x)
        output = model(x)
        loss = F.cross_entropy(output, y) + F.mse_loss(output, wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, copied in zip(average.parameters(), model.parameters()):
                mine.lerp_(copied, 0.01)
            for name, parameter in model.named_parameters():
                slow[name].lerp_(parameter, 0.001)
    print(len(history))


main()
