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
# # The learning rate with more ranks
#
# With n ranks and the same batch size per rank, the global batch is n times as large, and an epoch has 1/n of the
# steps. DDP **averages** gradients, so each step is as long as before, and there are fewer of them: training per epoch
# is slower unless you change the learning rate. Common rules:
#
# | optimizer | rule | source |
# | --- | --- | --- |
# | SGD | multiply by n (linear), with warm-up | Goyal et al. 2017 |
# | Adam, AdamW | multiply by √n (square root), with warm-up | Malladi et al. 2022 |
# | any | keep the *global* batch, and change nothing | `scaling="strong"` in this lab |
#
# None of them holds for any batch size. Verify with a short run.
#
# A scheduler counts **optimizer steps**. Compute its lengths from the steps of the job, which depend on n: a schedule
# for 10,000 steps that was written for one device ends far too late on eight. With gradient accumulation, call
# `scheduler.step()` once per optimizer step, not once per micro-batch.

# %%
# %load_ext labkit

# %%
# %%torchrun 2
from math import sqrt

SAMPLES, BATCH_PER_RANK, EPOCHS, BASE_RATE = 8192, 64, 3, 1e-3

steps = EPOCHS * (SAMPLES // (BATCH_PER_RANK * world_size))
warmup = steps // 20
optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1, device=device))], lr=BASE_RATE * sqrt(world_size))
rising = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, total_iters=warmup)
falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - warmup)
scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [rising, falling], milestones=[warmup])

rates = []
for _ in range(steps):
    optimizer.step()  # after backward
    rates.append(optimizer.param_groups[0]["lr"])
    scheduler.step()
report(steps=steps, first=f"{rates[0]:.1e}", highest=f"{max(rates):.1e}", last=f"{rates[-1]:.1e}")

# %% [markdown]
# A checkpoint needs `scheduler.state_dict()`, too, unless the rate is a function of the step, as in the scripts of this
# lab (`--option warmup_steps=100 --option lr_decay=cosine`). If you resume with another number of ranks, the number of
# steps changes: build the scheduler for the new number, and set its position by the fraction of *samples* that are
# done.
