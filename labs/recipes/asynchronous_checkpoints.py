# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     notebook_metadata_filter: -jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Save a checkpoint while training continues
#
# `dcp.save` blocks every rank until all files are written. `dcp.async_save` copies the state to CPU memory, which is
# fast, and writes it in the background. Three rules:
#
# - **One at a time.** Wait for the previous save before the next one starts; otherwise the copies add up in memory.
# - **A separate process group.** The background thread coordinates the ranks with collectives. On the group of the
#   training, they would interleave with those of the steps. It must be a group of a CPU backend, gloo.
# - **A checkpoint counts only when it is complete.** Rename its folder, or write a marker, after `result()` returns.

# %%
# %load_ext labkit

# %%
# %%torchrun 2
import shutil
from pathlib import Path
from tempfile import gettempdir

import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

folder = Path(gettempdir()) / f"labkit-recipe-{os.getppid()}"
saving = dist.new_group(backend="gloo")
model = torch.nn.Linear(512, 512).to(device)
fully_shard(model, mesh=dist.init_device_mesh(device.type, (world_size,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

pending = None
for step in range(1, 7):
    model(torch.ones(8, 512, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 3 == 0:
        if pending:
            pending.result()  # the previous one must be complete
        pending = dcp.async_save(model.state_dict(), checkpoint_id=folder / f"step{step}", process_group=saving)
pending.result()

saved = {"weight": torch.zeros(512, 512), "bias": torch.zeros(512)}
dcp.load(saved, checkpoint_id=folder / "step6")
whole = model.state_dict()["weight"].full_tensor()
report(checkpoints=sorted(path.name for path in folder.iterdir()), equal=torch.equal(saved["weight"], whole.cpu()))
dist.barrier()
if rank == 0:
    shutil.rmtree(folder)

# %% [markdown]
# What is saved is the state at the moment of the call, because the copy is made before `async_save` returns. Training
# may change the parameters at once.
