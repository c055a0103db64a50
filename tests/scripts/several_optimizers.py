"""Training loops with more than one optimizer."""

import torch
import torch.nn.functional as F
from small import loader, log, mlp
from torch import nn


def two_optimizers():
    """A generator and its critic."""
    maker, critic = nn.Linear(4, 8), mlp()
    first, second = torch.optim.Adam(critic.parameters()), torch.optim.Adam(maker.parameters())
    for x, _ in loader(32):
        with torch.no_grad():
            fake = maker(torch.randn(len(x), 4))
        judged = critic(x).mean() - critic(fake).mean()
        judged.backward()
        first.step()
        first.zero_grad()
        made = critic(maker(torch.randn(len(x), 4))).mean()
        made.backward()
        second.step()
        second.zero_grad()
        critic.zero_grad()
        log("two", true_loss=judged.item(), other_loss=made.item())


def both_before_both():
    """An actor and a critic: both gradients first, then both steps; each prints its own loss."""
    actor, critic = mlp(), mlp(4)
    for_actor, for_critic = torch.optim.Adam(actor.parameters()), torch.optim.SGD(critic.parameters(), lr=0.1)
    for x, y in loader():
        for_actor.zero_grad()
        for_critic.zero_grad()
        wrong, value = F.cross_entropy(actor(x), y), critic(x).square().mean()
        wrong.backward()
        value.backward()
        for_actor.step()
        for_critic.step()
        log("both", true_loss=wrong.item(), other_loss=value.item())


def one_loss_for_two():
    """One optimizer for matrices and one for the rest, as with Muon: they have one loss."""
    model = mlp()
    first = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.dim() == 2], lr=0.1)
    second = torch.optim.Adam([parameter for parameter in model.parameters() if parameter.dim() != 2])
    for x, y in loader():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        first.step()
        second.step()
        model.zero_grad()
        log("shared", true_loss=loss.item())


def inside_backward():
    """Each parameter has an optimizer that steps as soon as its gradient is there."""
    model = mlp()
    own = {parameter: torch.optim.Adam([parameter], foreach=False) for parameter in model.parameters()}

    def step(parameter):
        own[parameter].step()
        own[parameter].zero_grad()

    handles = [parameter.register_post_accumulate_grad_hook(step) for parameter in model.parameters()]
    for x, y in loader(160):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        log("inside", true_loss=loss.item())
    for handle in handles:
        handle.remove()  # torch would keep the optimizers for good
