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
# # Build it yourself: DDP, ZeRO and FSDP
#
# **Could you write DDP with nothing but `dist.all_reduce`? And ZeRO with a reduce-scatter and an all-gather?**
#
# In this lab you do. `check` runs your code on four CPU ranks, as an ordinary run with its own folder, and grades what
# the ranks did:
#
# - **results**: losses, gradients and final parameters as on a single device. The inputs are new in each check,
#   and each rank has its own samples only
# - **bytes sent** per rank and step, how often, and what: zeros are not communication
# - **computation**: each rank computes its own samples, no more and no less
# - **memory**: what exists between two steps, and at the peak of forward and backward, in tensors and in the process
# - **overlap**: the order in which communication starts, matrix products run, and your code waits
# - **no finished API**: the functions of `torch.distributed` are yours; `DistributedDataParallel` and the like are not,
#   nor are files, threads, other processes, or NumPy for what torch should compute
#
# If a criterion is not met, the answer names it, the rank, the step, what was expected and what was measured. If your
# code hangs, it says which rank waits in which call.
#
# The cells of this lab compute for about 1 minute on two cores, and each check for 5 to 15 seconds. Writing takes
# longer: plan an afternoon, or one exercise per day.

# %%
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from labkit import Run, check, pictures, place, run

# %load_ext labkit

# %% [markdown]
# Your answer is a function or a class. It is sent to the ranks as source code, together with everything that it uses
# from this notebook, and runs there in one process per rank. Inside it, `dist.get_rank()` and `dist.get_world_size()`
# say which rank it is on. Nothing needs to be initialised.
#
# ## 1. All-reduce after backward
#
# Every rank has computed the gradients of its own samples. All ranks must update with the **mean** over the ranks.
#
# **Predict:** how many bytes does each of four ranks send per step, if the gradients have M bytes? (See
# [lab 01](01_collectives.py): 2 (n − 1) / n · M.) And if each rank gathers the gradients of all ranks instead?
#
# `average_gradients(model)` is called after each backward, before the optimizer updates.


# %% tags=["exercise"]
def average_gradients(model):
    # for each parameter: replace parameter.grad by its mean over all ranks
    ...


check("build_data_parallel.naive", average_gradients)

# %% [markdown]
# ## 2. All-reduce during backward
#
# Your first version computes, then communicates. But the gradient of the last layer is ready long before that of the
# first one, and backward does not need it any more: its all-reduce can run in the meantime.
#
# PyTorch calls a function as soon as the gradient of a parameter is complete, if you ask it to:
# `parameter.register_post_accumulate_grad_hook(function)`. With `async_op=True`, `dist.all_reduce` returns at once; the
# result is there when `.wait()` of the returned object has returned.
#
# ### Try a hook before it is graded
#
# `%%torchrun 2 --keep` starts two ranks that **stay**, with their variables, and `%%ranks` runs a cell on them. Each
# has the same small model and its own samples.

# %%
# %%torchrun 2 --keep --device cpu
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
torch.manual_seed(1 + rank)
x = torch.randn(4, 8)
model(x).mean().backward()
gradient = model[0].weight.grad.clone()  # the local one, of the first layer
hooks = []

# %% [markdown]
# **Predict:** the model has four parameters: weight and bias of layer 0 and of layer 2. In which order are their hooks
# called?


# %%
# %%ranks
def hook(parameter):
    called.append(names[parameter])


for handle in hooks:  # of an earlier version, if you run this cell again
    handle.remove()
called, names = [], {parameter: name for name, parameter in model.named_parameters()}
hooks = [parameter.register_post_accumulate_grad_hook(hook) for parameter in names]
model.zero_grad()
model(x).mean().backward()
called

# %% [markdown]
# Layer 2 comes first, because backward begins at the loss. So its gradients can be sent while those of layer 0 are
# still being computed.
#
# **Predict:** an all-reduce has been started with `async_op=True`, and nobody has waited for it. What is in the tensor?

# %%
# %%ranks
number = torch.full((2**24,), float(rank + 1))
work = dist.all_reduce(number, async_op=True)
print("finished at once:", work.is_completed())

# %%
# %%ranks
work.wait()
number[0].item()

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# Nothing that you may use: the old value, the sum, or a mixture of both. Only after `wait()` is it the sum, 1 + 2 = 3.
# So your class must store what `all_reduce` has returned until `finish()`.
#
# </details>
#
# **Try your hook:** let `hook` above communicate, and run its cell again. Then each rank should have the mean of both
# local gradients. The next cell computes it in the notebook, and the last one compares: what does it show before your
# hook works, and after?

# %%
# %ranks pull gradient
mean = (gradient[0] + gradient[1]) / 2
# %ranks push mean

# %%
# %%ranks
(model[0].weight.grad - mean).abs().max().item()

# %%
# %ranks stop

# %% [markdown]
# ### Write the class
#
# This is the timeline of PyTorch's DDP on this machine. Where does each all-reduce start?

# %%
ddp = run("ddp", **place(2), workload="gpt", batch_size=4, steps=12, options={"bucket_mb": 1}).wait()
ddp.figure("timeline")

# %% [markdown]
# Write a class. It is created once, before the first step. This time **every rank starts with different parameters**:
# what does DDP do about that when it is created? `finish()` is called after each backward.
#
# What is graded besides losses and bytes: at least half of the bytes must be sent by calls that start before the last
# matrix product of backward, and none of them may be waited for before it.


# %% tags=["exercise"]
class Overlapped:
    def __init__(self, model):
        # make the parameters equal on all ranks, and register a hook for each of them
        ...

    def finish(self):
        # wait for everything that has been started
        ...


check("build_data_parallel.hooks", Overlapped)

# %% [markdown]
# The newest run is that of your answer (or, before it, the one above). This is the overlap that *you* made. Does every
# all-reduce start as early as it could?

# %%
Run.attach("last").figure("timeline")

# %% [markdown]
# ## 3. Buckets, and accumulation without communication
#
# One all-reduce per parameter pays the latency α once per parameter: see the cost model in
# [lab 01](01_collectives.py). DDP therefore copies the gradients of several parameters into one *bucket* and reduces
# the bucket. This simulation shows how the size of the buckets changes the end of a step:

# %%
pictures.data_parallel.buckets(bucket_mb=(25, 1))

# %% [markdown]
# **Predict:** in which order do the gradients become ready, and which parameters therefore belong into one bucket?
#
# With *gradient accumulation*, several micro-batches add to the gradients before one update. Only the last one needs an
# all-reduce. DDP has a context manager for the others: inside of `with wrapped.no_sync():`, backward only accumulates.
#
# The last two steps of the check have two micro-batches each, the first one inside of `no_sync()`. A bucket should hold
# about `bucket_bytes` bytes: a step may have at most twice as many calls as the smallest possible number of buckets.


# %% tags=["exercise"]
class Bucketed:
    def __init__(self, model, bucket_bytes):
        # equal parameters, buckets, hooks
        ...

    def finish(self):
        # wait, and copy the means from the buckets back to the gradients
        ...

    @contextmanager
    def no_sync(self):
        # inside: backward only accumulates
        ...


check("build_data_parallel.buckets", Bucketed)

# %% [markdown]
# ## 4. ZeRO-1: one shard of the optimizer state
#
# Adam stores two numbers per parameter. In [lab 04](04_zero.py) each rank stored only a shard of them, and PyTorch's
# `ZeroRedundancyOptimizer` sent 3 U per step: an all-reduce (2 U) and the new parameters (1 U). The paper needs 2 U, as
# much as DDP.
#
# **Predict:** which of the two halves of the all-reduce does a rank need that updates only its shard?
#
# PyTorch 2.13 has renamed the two collectives; this cell works with all versions, and your answer may use the names.
# `reduce_scatter(output, input)` needs an output of 1/n of the input; `all_gather(output, input)` the reverse. Here the
# first dimension of every parameter is a multiple of the number of ranks.

# %%
print(torch.__version__)
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

# %% [markdown]
# `ZeRO1(model, make_optimizer)` is created once, with equal parameters on all ranks. `make_optimizer(tensors)` returns
# an Adam for these tensors. `step()` is called after each backward, when every rank has the gradients of its samples.
#
# Memory between two steps: the parameters (P bytes), and of one shard at most a copy and two moments (3P / n).


# %% tags=["exercise"]
class ZeRO1:
    def __init__(self, model, make_optimizer):
        # the shard of each parameter that this rank updates, and an optimizer for the shards
        ...

    def step(self):
        # mean gradients of the shards, update, new parameters on all ranks
        ...


check("build_data_parallel.zero1", ZeRO1)

# %% [markdown]
# ## 5. ZeRO-2: one shard of the gradients
#
# A rank needs the mean gradient only for its shard, and the rest of the gradients only until it has been sent. When can
# it be freed? Your hook of exercise 2 knows the moment.
#
# Besides the bytes and the memory of ZeRO-1, the check measures the gradients: after backward a shard of them (P / n)
# and one whole gradient at most, at the peak of backward one whole gradient more.


# %% tags=["exercise"]
class ZeRO2:
    def __init__(self, model, make_optimizer):
        # as ZeRO1; a hook replaces each gradient by its shard
        ...

    def step(self):
        # update, new parameters on all ranks
        ...


check("build_data_parallel.zero2", ZeRO2)

# %% [markdown]
# ## 6. One unit of FSDP
#
# Now the parameters too. A *unit* stores a shard of its layer's parameters. It gathers them before it computes and
# **frees them at once**; backward gathers them again, and reduce-scatters the gradient ([lab 05](05_fsdp.py)).
#
# Autograd does not know about this, so you tell it: `torch.autograd.Function` has a `forward(ctx, …)` and a
# `backward(ctx, gradient)` that you write. What `forward` saves stays in memory until backward, so save the input and
# not the gathered parameters. `backward` can compute the output again with gathered parameters inside of
# `torch.enable_grad()`, and ask `torch.autograd.grad` for the gradients.
#
# `torch.func.functional_call(layer, {name: tensor, …}, x)` computes a layer with other parameters, and
# `layer.to("meta")` drops its own.
#
# `Unit(layer)` replaces each linear layer of the network. The optimizer gets `parameters()` of your units: only the
# shards. **Predict** the bytes per step in U, and the largest number of gathered units that exist at once. The check
# allows 3 U, and no gathered parameters after forward and between two steps.


# %% tags=["exercise"]
class Unit(nn.Module):
    def __init__(self, layer):
        # self.shard = nn.Parameter(the shard of this rank), and what is needed to compute
        ...

    def forward(self, x):
        # gather, compute, free; with a backward that gathers again and reduce-scatters
        ...


check("build_data_parallel.fsdp", Unit)

# %% [markdown]
# ## Summary
#
# | | sent per step | between two steps | in backward |
# | --- | --- | --- | --- |
# | DDP | 2 U | P, and 2P of Adam | P of gradients |
# | ZeRO-1 | 2 U | P, and 2P / n | P of gradients |
# | ZeRO-2 | 2 U | P, and 2P / n | P / n of gradients |
# | FSDP | 3 U | P / n, and 2P / n | one unit, P / n of gradients |
#
# What the finished implementations add to yours: mixed precision, prefetching of the next unit, a separate CUDA stream
# for communication, checkpoints, and parameters whose size is not a multiple of the number of ranks.
