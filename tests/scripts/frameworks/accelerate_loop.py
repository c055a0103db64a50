"""A loop prepared by accelerate, with gradient accumulation and metrics gathered over the ranks; an epoch's last step
is a short one."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from labkit.integrations import Tracker

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, log_with=Tracker())
accelerator.init_trackers("a project", {"lr": 1e-2})
torch.manual_seed(5)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = TensorDataset(torch.randn(80, 8), torch.randint(0, 3, (80,)))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
for _ in range(2):
    running = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        running.append(loss.item())
        if accelerator.sync_gradients:
            print(f"loss {sum(running) / len(running)!r}", flush=True)
            running.clear()
    mean = float(accelerator.gather(loss.detach()).mean())
    accelerator.log({"epoch_loss": mean, "a text": "left out"}, step=99)
    if accelerator.is_main_process:
        print(f"metric epoch_loss {mean!r}", flush=True)
accelerator.wait_for_everyone()
accelerator.end_training()
