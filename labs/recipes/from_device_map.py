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
# # From `device_map="auto"` to DDP or FSDP
#
# `device_map="auto"` (Accelerate, Transformers) puts some layers on each GPU of **one process**. It lets you *load* a
# model that is too large for one GPU, and it is fine for inference. In training, only one GPU computes at a time: a
# pipeline without micro-batches. Adding `torchrun` does not help; every process would place the whole model on all
# GPUs.
#
# | the model with its training states | use |
# | --- | --- |
# | fits on one GPU | DDP: one process per GPU, no device map |
# | does not fit, but a layer does | FSDP2: `fully_shard` on each layer, then on the model |
# | is frozen, with a small adapter (LoRA) | DDP if the frozen weights fit on each GPU, otherwise FSDP2 |
#
# What changes in the script:
#
# ```diff
# -model = AutoModelForCausalLM.from_pretrained(name, device_map="auto")
# +with torch.device("meta"):  # shapes without memory
# +    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name))
# +for layer in model.model.layers:
# +    fully_shard(layer)
# +fully_shard(model)
# +model.to_empty(device="cuda")  # memory for this rank's shards
# +weights = AutoModelForCausalLM.from_pretrained(name).state_dict() if dist.get_rank() == 0 else {}
# +whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
# +set_model_state_dict(model, weights, options=whole)
#  optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)  # after sharding
# ```
#
# and the start: `torchrun --nproc-per-node=8 train.py` instead of `python train.py`. Remove `model.to(...)` and every
# `.cuda()`; use `DistributedSampler`; let one rank print.
#
# Why so many lines? With `from_pretrained` on every rank, eight ranks of a node would each load the whole model into
# the memory of its CPUs: 70 billion parameters in 16 bits are 8 · 140 GB. So only rank 0 reads the weights, and sends
# each rank its shards. Buffers that a checkpoint does not contain, such as the frequencies of rotary embeddings, must
# be computed again after `to_empty`.
#
# The following cell does this with a small model, and shows the difference in memory: all layers in one process, and a
# shard per rank.

# %%
# %load_ext labkit

# %%
# %%torchrun 2
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard


def layers():
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))


def mib(model):
    local = (getattr(each, "to_local", lambda each=each: each)() for each in model.parameters())
    return round(sum(each.numel() * each.element_size() for each in local) / 2**20, 2)


whole = layers() if rank == 0 else None
with torch.device("meta"):
    model = layers()
mesh = dist.init_device_mesh(device.type, (world_size,))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
model.to_empty(device=device)
weights = whole.state_dict() if rank == 0 else {}
set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model(torch.ones(4, 256, device=device)).sum().backward()
optimizer.step()
report(read_here=f"{mib(whole) if rank == 0 else 0} MiB", kept_here=f"{mib(model)} MiB")
