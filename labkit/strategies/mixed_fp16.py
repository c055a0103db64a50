"""Mixed precision in float16: small gradients would vanish in it, so the loss is scaled up and the gradients down again."""

import torch
from torch.nn.functional import cross_entropy

SCALER = torch.amp.GradScaler()  # skips a step in which a gradient overflows


def train_step(model, optimizer, inputs, targets) -> torch.Tensor:
    """One step; its loss is given back without waiting for the device."""
    optimizer.zero_grad()
    with torch.autocast(inputs.device.type, dtype=torch.float16):
        loss = cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
    SCALER.scale(loss).backward()
    SCALER.step(optimizer)
    SCALER.update()
    return loss.detach()
