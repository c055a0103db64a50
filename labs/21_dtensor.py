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
# # DTensor and DeviceMesh: the language under it all
#
# **DDP, FSDP, tensor and sequence parallelism look like four systems. What if all of them are one matrix product, and
# differ only in where the rows and columns of its three matrices are?**
#
# A DTensor is a tensor with a *placement*: what each rank has of it. PyTorch's FSDP2 and tensor parallelism are written
# with it. In this lab you learn to read placements, to predict which bytes a change of placement costs, and from which
# batch on a layout is no longer bound by communication. At the end you write a plan that splits a block.
#
# This lab takes about 40 minutes. Its cells compute for about 1 minute on two cores.

# %%
import torch

from labkit import check, on_trial, pictures

# %load_ext labkit
print(torch.__version__)

# %% [markdown]
# ## Placements
#
# | placement | what a rank has |
# | --- | --- |
# | `Replicate()` | the whole tensor |
# | `Shard(dim)` | one of n chunks along dimension `dim` |
# | `Partial()` | a tensor of the whole shape, whose sum over the ranks is the tensor: a *partial sum* |
#
# **Predict:** each of four ranks calls `distribute_tensor` with *different* numbers: 0 to 15, plus 100 times its rank.
# Which numbers does rank 2 have under `Shard(0)`, and under `Replicate()`? Under `Partial()`, what is `full_tensor()`?

# %%
# %%torchrun 4
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

mesh = dist.init_device_mesh(device.type, (4,))
mine = (torch.arange(16.0, device=device) + 100 * rank).view(4, 4)
for placement in (Replicate(), Shard(0), Shard(1)):
    placed = distribute_tensor(mine, mesh, [placement])
    report(**{str(placement): placed.to_local().flatten()})
ones = DTensor.from_local(torch.ones(2, device=device), mesh, [Partial()])
report(partial=ones.to_local(), its_full_tensor=ones.full_tensor())

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# `distribute_tensor` takes the tensor of rank 0, whatever the others have: it is scattered, or broadcast
# (`src_data_rank=None` turns this off). `DTensor.from_local` does the opposite: each rank's tensor counts as what the
# placement says, and nothing is sent or compared. So a wrong placement there is a wrong result, not an error.
#
# `full_tensor()` of the partial sums is 4: one from each rank.
#
# </details>
#
# ## What a change of placement costs
#
# `redistribute` changes the placement. Each change is one of the collectives of [lab 01](01_collectives.py), or
# nothing.
#
# **Predict** for a tensor of 4 MiB on 4 ranks: which collective is each of these, and how many MiB does a rank send, if
# the collective is a ring? (Shard 0 to shard 1 is an all-to-all: a rank *keeps* a part of its shard.)
#
# | from | to | collective | MiB |
# | --- | --- | --- | --- |
# | shard | replicate | ? | ? |
# | replicate | shard | ? | ? |
# | partial | replicate | ? | ? |
# | partial | shard | ? | ? |
# | shard 0 | shard 1 | ? | ? |

# %%
# %%torchrun 4 --as moved
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls the operations on its local tensors, and these come here again
        space, _, name = func._schema.name.partition("::")
        if space in ("_c10d_functional", "_dtensor") and isinstance(args[0], torch.Tensor) and len(args) > 1:
            report(**{f"{before} to {after}: {name}, input MiB": args[0].nbytes / 2**20})
        return func(*args, **(kwargs or {}))


mesh = dist.init_device_mesh(device.type, (4,))
S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()
for before, after in ((S0, R), (R, S0), (P, R), (P, S0), (S0, S1)):
    shape = {S0: (256, 1024)}.get(before, (1024, 1024))
    with Calls():
        DTensor.from_local(torch.ones(shape, device=device), mesh, [before]).redistribute(mesh, [after])

# %% [markdown]
# The table has the *input* of each call. A ring sends (n − 1) times the input of an all-gather, (n − 1) / n of that of
# a reduce-scatter, and twice this for an all-reduce; an all-to-all sends (n − 1) / n of its input:

# %%
factors = {"all_gather": 3, "reduce_scatter": 3 / 4, "all_reduce": 2 * 3 / 4, "shard_dim_alltoall": 3 / 4}
for name in moved.names:
    factor = next(value for operation, value in factors.items() if operation in name)
    print(f"{name.removesuffix(', input MiB'):40} {factor * moved[name][0]:.2f} MiB sent per rank in a ring")

# %% [markdown]
# <details class="answer"><summary>Answer, and a surprise on CPU ranks</summary>
#
# All-gather: 3 MiB. Nothing: a rank drops what it does not need. All-reduce: 6 MiB. Reduce-scatter: 3 MiB. The
# all-to-all would send 3/4 of a shard of 1 MiB: 0.75 MiB.
#
# On a CPU mesh, torch 2.13 does not send an all-to-all: it *all-gathers* the whole tensor and keeps a slice, 3 MiB, and
# says so in the log. The numbers are right, and the traffic is four times as large. On GPUs it is an all-to-all.
#
# From partial to replicate costs as much as from partial to shard, and then from shard to replicate. This is the whole
# difference between ZeRO and DDP: whoever needs only its own shard of the sum stops halfway.
#
# </details>

# %%
on_trial("dtensor-all-to-all")

# %% [markdown]
# ## Meshes of two dimensions
#
# A mesh is an array of ranks, and a DTensor has one placement *per dimension of the mesh*. `mesh["tp"]` is the part
# with this name: the group in which this rank communicates along it.

# %%
pictures.mesh.grid({"dp": 2, "tp": 2})

# %% [markdown]
# **Predict:** a 4 × 4 matrix is placed with `[Shard(0), Shard(1)]` on this mesh. Which block does rank 2 have? And with
# `[Shard(0), Shard(0)]`? If the first placement of `[Shard(0), Shard(1)]` is changed to `Replicate()`, which rank sends
# something to rank 2?

# %%
# %%torchrun 4
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

mesh = dist.init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
for name in ("dp", "tp"):
    report(**{f"{name}_group": dist.get_process_group_ranks(mesh.get_group(name))})
x = torch.arange(16.0, device=device).view(4, 4)
blocks = distribute_tensor(x, mesh, [Shard(0), Shard(1)])
report(shard_0_and_1=blocks.to_local().flatten())
report(shard_0_and_0=distribute_tensor(x, mesh, [Shard(0), Shard(0)]).to_local().flatten())
report(gathered_along_dp=blocks.redistribute(mesh, [Replicate(), Shard(1)]).to_local().flatten())

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# Rank 2 is in row 1 and column 0 of the mesh: the lower left block. With `Shard(0)` twice, `dp` splits the rows in
# two halves and `tp` each half again: it has the third row. The all-gather along `dp` is among ranks 0 and 2 only.
#
# `[Shard(0), Shard(1)]` of a weight is FSDP with tensor parallelism ([lab 08](08_combine.py)). `[Replicate(),
# Shard(0)]` is hybrid sharding.
#
# </details>
#
# ## One matrix product, many strategies
#
# C = A B sums over the *contracting dimension*: the columns of A and the rows of B. The scaling book (Austin et al.
# 2025, [chapter 3](https://jax-ml.github.io/scaling-book/sharding/)) has four cases:
#
# 1. The contracting dimension is not sharded: nothing to send.
# 2. It is sharded in one of the two matrices.
# 3. It is sharded in both.
# 4. A is sharded by rows and B by columns, over the same ranks.
#
# **Predict** the placement of C for each line of the next cell, and which of them must communicate. (A sum of partial
# sums is a partial sum. What about relu of one?)

# %%
# %%torchrun 4
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

mesh = dist.init_device_mesh(device.type, (4,))
S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()
shapes = {S0: (2, 8), S1: (8, 2), R: (8, 8), P: (8, 8)}


def placed(placement):
    return DTensor.from_local(torch.ones(shapes[placement], device=device), mesh, [placement])


for a, b in ((S0, R), (R, S1), (S1, S0), (S1, R), (R, S0), (S0, S1), (P, R)):
    with CommDebugMode() as calls:
        c = placed(a) @ placed(b)
    report(**{f"{a} @ {b}": f"{c.placements[0]}, {calls.get_total_counts()} collectives"})
with CommDebugMode() as calls:
    c = torch.relu(placed(P))
report(**{f"relu of {P}": f"{c.placements[0]}, {calls.get_total_counts()} collectives"})

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# | A | B | C | this is |
# | --- | --- | --- | --- |
# | shard 0 | replicate | shard 0 | data parallelism: samples are split |
# | replicate | shard 1 | shard 1 | a column-parallel layer |
# | shard 1 | shard 0 | partial | a row-parallel layer (case 3) |
# | shard 1 | replicate | partial | case 2 |
# | replicate | shard 0 | partial | case 2 |
# | shard 0 | shard 1 | shard 0, after an all-gather | case 4: a rank would have blocks of the diagonal only |
# | partial | replicate | partial | a sum of products is a product of the sum |
#
# In case 2 the book gathers the sharded matrix. DTensor gathers nothing: it takes the matching slice of the other
# matrix, which is there already, and leaves a partial sum. The bill comes later: relu is not linear, so that it first
# all-reduces.
#
# </details>
#
# A placement follows its tensor into backward, too. **Predict:** the batch is `Shard(0)` and the weight `Replicate()`.
# What is the placement of the weight's gradient? And if the weight passes through `redistribute` first, which
# collective does backward call, with a replicated and with a sharded weight?

# %%
# %%torchrun 4
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

mesh, S0, R = dist.init_device_mesh(device.type, (4,)), Shard(0), Replicate()
x = DTensor.from_local(torch.randn(2, 8, device=device), mesh, [S0])
for name, placement, gather in (("R", R, False), ("R, redistributed", R, True), ("S(0), redistributed", S0, True)):
    w = distribute_tensor(torch.randn(8, 8, device=device), mesh, [placement]).requires_grad_()
    y = x @ (w.redistribute(mesh, [R]) if gather else w)
    with CommDebugMode() as calls:
        y.to_local().square().sum().backward()
    report(**{f"weight {name}": [f"gradient {w.grad.placements[0]}", *map(str, calls.get_comm_counts())]})

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# A partial sum: each rank has the gradient of its own samples, and the optimizer would have to add them. The gradient
# of a tensor that was redistributed gets the placement that the tensor had before: partial to replicate is the
# all-reduce of DDP. If the weight is sharded and gathered for the product, then partial to shard is the reduce-scatter
# of FSDP.
#
# </details>
#
# ## From which batch on does it pay off?
#
# Let C be the FLOP/s that a device reaches, and W the bytes per second of its link. α = C / W is what a device computes
# while it sends one byte. Take the MLP of a layer, width D and inner width F, in bf16, forward only; b are the tokens
# per device. Its two products take 4·b·D·F / C seconds. (The scaling book, [chapter
# 5](https://jax-ml.github.io/scaling-book/training/), compares these times. Everything overlaps with computation.)
#
# | layout | sent per device and layer, bytes | hidden behind computation if |
# | --- | --- | --- |
# | FSDP | 4·D·F: both matrices, gathered | b > α |
# | TP over t devices | 2 · 2·t·b·D: gather the tokens of t devices, reduce-scatter | F > t·α, whatever the batch |
# | FSDP × TP | 4·D·F / t, and that of TP | b > (α₂ / t) / (1 − t·α / F), with α₂ of the link of FSDP |
# | EP | 2 · 2·b·D: dispatch and combine | F of *one expert* > α, whatever the batch |
#
# **Predict** for 64 H100 on 8 nodes, D = 8192, F = 28672: how many tokens does each device need under FSDP? Does TP
# within the node lower that? And experts of F = 2048, on the GPUs of one node or of all?

# %%
pictures.links.thresholds(machine="h100x8", devices=64, width=8192, inner=28672, expert=2048)

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# Under FSDP each device needs about 2,000 tokens: one sequence of 2,048. α is 693 TFLOP/s over 371 GB/s of NVLink, or
# 1,868; the rest is latency.
#
# With TP within the node it is *more*, not less. TP gathers 1/8 of the matrices, but each rank then has only its own
# network adapter, where the ring of FSDP over whole nodes used all eight. The messages of TP come on top. On TPUs, each
# axis has separate links, and the best mix of both lowers the threshold to 4·α² / F. On GPUs, take TP for memory, or
# if there are more devices than sequences.
#
# EP does not depend on the batch either, except for latency. Small experts are bound by communication between nodes,
# whatever the batch: DeepSeek-V3 (2024, section 3.2.2) sends a token to at most four nodes for this reason.
#
# All of this is *modelled*, by latency and bandwidth of the links in the lab's table ([lab 19](19_clusters.py)).
#
# </details>
#
# **Try it:** the same on `machine="a100x8"`, with `devices=1024`, and with experts of 28672. Which lines move, and why?

# %%
on_trial("tp-batch")

# %% [markdown]
# ## Exercise: the bytes of a change of placement
#
# Write `sent(before, after, size, ranks)`: the bytes that each rank sends, by a ring or in an all-to-all, if a tensor
# of `size` bytes in total is redistributed. Placements are `"R"`, `"P"`, `"S0"` and `"S1"`; `after` is never `"P"`.


# %% tags=["exercise"]
def sent(before, after, size, ranks): ...


check("dtensor.bytes", sent)

# %% [markdown]
# ## Exercise: a plan for a block
#
# `parallelize_module(module, mesh, plan)` gives each named module a style. A style places the parameters of a module,
# and says what its input has (`input_layouts`) and what its output gets (`output_layouts`). These are the defaults:

# %%
from torch.distributed.tensor import Replicate, Shard, parallel

gather = parallel.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
for style in (parallel.ColwiseParallel(), parallel.RowwiseParallel(), parallel.SequenceParallel(), gather):
    print(style)

# %% [markdown]
# | style | parameters | input → output of the module |
# | --- | --- | --- |
# | `ColwiseParallel` | weight `Shard(0)`: output features | replicate → features sharded |
# | `RowwiseParallel` | weight `Shard(1)`: input features | features sharded → replicate, unless you say otherwise |
# | `SequenceParallel` | replicate, as DTensors | positions sharded → the same |
# | `PrepareModuleInput` | unchanged | redistributes the input once, for all modules inside |
#
# Your block is one half of a transformer layer: a norm, causal attention, and a residual connection. The names of its
# modules and the order of its dimensions are drawn for you. **Run the cell: the verdict says what they are.**
#
# Write `parallelize(block, mesh)`, which splits the block in place. The check trains it on four CPU ranks. Losses and
# gradients must be those of one device, every matrix must be split, and a rank may send one all-gather and one
# reduce-scatter of the activations in forward and in backward, and no more than that. **Predict** what goes wrong if
# the norm gets no style, and how many all-gathers there are without `PrepareModuleInput`.


# %% tags=["exercise"]
def parallelize(block, mesh):
    # a plan {"…": parallel.SequenceParallel(…), "….…": parallel.ColwiseParallel(), …}, then
    # parallel.parallelize_module of the block, the mesh and the plan
    ...


check("dtensor.plan", parallelize)

# %% [markdown]
# ## Summary
#
# | strategy | batch | weight | what is redistributed |
# | --- | --- | --- | --- |
# | DDP | shard | replicate | gradients: partial → replicate |
# | FSDP | shard | shard | weights: shard → replicate; gradients: partial → shard |
# | TP | replicate | shard (features) | activations: partial → replicate |
# | TP and SP | replicate; shard (positions) | shard (features) | activations: shard → replicate, partial → shard |
# | EP | shard | shard (experts) | tokens: shard → another shard |
#
# A strategy is a choice of placements. What it costs follows from the table of `redistribute`.
