"""Resumes as scripts with torch.distributed.checkpoint do: an optimizer step that only creates state, batches that are
skipped."""

import sys
import time
from datetime import datetime

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.monitor import Event, log_event
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(4, 2)
slow, fast = [model.weight], [model.bias]
optimizer = torch.optim.AdamW([{"params": slow, "lr": 1e-3}, {"params": fast, "lr": torch.tensor(1e-2)}])
before = model.weight.clone()
get_state_dict(model, optimizer)
assert optimizer.state, "it has stepped"
assert torch.equal(before, model.weight)
done = int(sys.argv[1])
loader = DataLoader(TensorDataset(torch.randn(48, 4)), 8)
for step, (batch,) in enumerate(loader, 1):
    if step == done:
        time.sleep(0.3)
        log_event(Event("resume", datetime.now(), {"step": step}))
    if step <= done:
        continue
    optimizer.zero_grad()
    model(batch).sum().backward()
    if step == done + 2:  # the first step of a warm-up: a learning rate of zero, after a backward
        for group in optimizer.param_groups:
            group["lr"] = 0.0
    optimizer.step()
print("done")
