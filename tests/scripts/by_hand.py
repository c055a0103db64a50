"""Loops that update their parameters themselves, without an optimizer; each prints its losses. No optimizer is made in
this process."""

import datetime

import torch
import torch.nn.functional as F
from torch import nn
from torch.monitor import Event, log_event
from torch.utils.data import DataLoader, TensorDataset


def loader(samples=24, batch_size=8):
    return DataLoader(TensorDataset(torch.randn(samples, 8), torch.randint(0, 3, (samples,))), batch_size=batch_size)


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def through_data():
    """As in many tutorials: `.data` hides the change from torch's version counters."""
    model = mlp()
    for x, y in loader():
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for parameter in model.parameters():
            parameter.data -= 0.1 * parameter.grad
        yield loss.item()


def accumulated():
    """Two micro-batches per step, an update under no_grad, and an evaluation after it."""
    model, losses = mlp(), []
    for index, (x, y) in enumerate(loader(48)):
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        losses.append(loss.item())
        if index % 2:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
            yield sum(losses)
            losses.clear()
    model.eval()
    with torch.no_grad():
        for x, _ in loader():
            model(x)


def without_a_module():
    weight, x = torch.zeros(8, requires_grad=True), torch.randn(16, 8)
    for _ in range(4):
        loss = (x @ weight - 1).square().mean()
        loss.backward()
        with torch.no_grad():
            weight.add_(weight.grad, alpha=-0.1)
        weight.grad.zero_()
        yield loss.item()


def with_autograd_grad():
    """Gradients as values, and new tensors in the place of the old ones."""
    weights, x = [torch.randn(8, 4, requires_grad=True), torch.randn(4, requires_grad=True)], torch.randn(16, 8)
    for _ in range(4):
        loss = (x @ weights[0] + weights[1]).square().mean()
        gradients = torch.autograd.grad(loss, iter(weights))
        weights = [(weight - 0.1 * gradient).detach().requires_grad_() for weight, gradient in zip(weights, gradients)]
        yield loss.item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for style in (through_data, accumulated, without_a_module, with_autograd_grad):
        log_event(Event("style", datetime.datetime.now(), {"style": style.__name__}))
        for loss in style():
            log_event(Event("printed", datetime.datetime.now(), {"true_loss": loss}))
