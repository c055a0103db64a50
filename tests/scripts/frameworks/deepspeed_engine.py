"""DeepSpeed's engine with ZeRO stage 1 and gradient accumulation; the optimizer is torch's, so that nothing is
compiled."""

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for minutes, and only inference uses it
MICRO_BATCHES = 3

torch.manual_seed(3)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(120, 8), torch.randint(0, 4, (120,)))
engine, _, loader, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, training_data=data)
running = []
for x, y in loader:
    loss = nn.functional.cross_entropy(engine(x), y)
    engine.backward(loss)
    running.append(loss.item())
    boundary = engine.is_gradient_accumulation_boundary()
    engine.step()
    if boundary:
        print(f"loss {sum(running) / len(running)!r}", flush=True)
        running.clear()
dist.barrier()
dist.destroy_process_group()
