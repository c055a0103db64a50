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
# # ZeRO: why keep the same thing n times?
#
# A model of 7 billion parameters, trained with Adam in 32 bits, needs 112 GB before it has seen a sample. A GPU of 80 GB cannot hold
# that. Four of them have 320 GB together, and DDP on four of them still stops at the same line: *out of memory*.
#
# **What are the other 208 GB full of?** Say it before you go on. This lab takes the waste away, one part after the other.

# %%
from labkit import Spec, SpecError, check, excerpt, pictures, place, run, show

HERE = place(2)
GPT = {**HERE, "workload": "gpt", "batch_size": 2, "precision": "fp32", "steps": 10, "samples": 100}
print(HERE)

# %% [markdown]
# ## The states of a model
#
# For each parameter, a rank that trains with Adam in 32 bits keeps
#
# | | bytes | |
# | --- | --- | --- |
# | the parameter | 4 | |
# | its gradient | 4 | from backward to the optimizer |
# | Adam's two moments | 8 | from step to step |
#
# That is **16 bytes a parameter**; these are the *model states*. Training in 16 bits does not change the sum: 2 for the parameter and 2
# for the gradient, then 12 in the optimizer, which keeps a 32-bit copy beside its two moments. The paper calls it 16Ψ.
#
# Our model is small, so that two CPU ranks can hold it too. Its states:

# %%
model = Spec(strategy="ddp", workload="gpt", nproc=2)
P = model.workload_row.parameters(model.options)
BYTES = {"parameters": 4, "gradients": 4, "optimizer": 8}

print(f"{P:,} parameters")
for part, size in BYTES.items():
    print(f"{part:11} {size * P / 1e6:5.1f} MB")

# %% [markdown]
# ## Predict: three things that can be shared
#
# ZeRO, the *zero redundancy optimizer*, has three stages. Each gives every rank one **shard** of one thing more, and leaves the rest of
# it to the others.

# %%
pictures.sharding.who_holds_what(ranks=4)

# %% [markdown]
# 1. Which part is sharded first, and why that one?
# 2. With four ranks, what does stage 1 save of the 16P bytes? And stage 3?
# 3. However many ranks there are: to how many bytes can stage 1 come down?
#
# <details class="answer"><summary>Answer</summary>
#
# 1. The optimizer state: it is half of all, and nobody needs it but the one who steps that parameter.
# 2. Stage 1 saves 6P of 16P, stage 3 saves 12P.
# 3. To 8P, the parameters and gradients, which stay whole. Only stage 3 has no such floor.
#
# </details>

# %% [markdown]
# ## DDP: everything, on every rank
#
# First the run that all others are measured by.

# %%
ddp = run("ddp", **GPT)
show(ddp)

# %%
ddp.wait().figure("memory_of_step")

# %% [markdown]
# One step of one rank: activations pile up in forward, and go in backward, while the gradients come. The parts are at their largest at
# different moments, so we look at each where *it* is largest, and put the formula beside it. (*Communication* is DDP's buckets:
# gradients once more, laid out for sending.)

# %%
SHARDED_FROM = {"optimizer": 1, "gradients": 2, "parameters": 3}  # the first stage that shards it


def largest(job, part):
    """Bytes of a part where it is largest within a step, on the rank that has most of it."""
    return max(max(rank.memory_step["owners"][part]) for rank in job.state.ranks.values())


# %%
def beside(job, stage):
    """What the formula says for a stage of ZeRO, beside what was measured."""
    print(f"{'MB on a rank':14}{'formula':>8}{'measured':>10}")
    for part, size in BYTES.items():
        shards = HERE["nproc"] if stage >= SHARDED_FROM[part] else 1
        print(f"{part:14}{size * P / shards / 1e6:8.2f}{largest(job, part) / 1e6:10.2f}")


beside(ddp, stage=0)

# %% [markdown]
# And the **traffic**. We count it in a unit of its own, so that strategies can be compared: one **U** is what a rank sends when all
# parameters are gathered once, or all gradients are scattered once: (n−1)/n · 4P bytes. An all-reduce is a reduce-scatter and an
# all-gather, so it costs 2 U.

# %%
U = (HERE["nproc"] - 1) / HERE["nproc"] * 4 * P


def traffic(job):
    """What a rank sends in a step, in U: by theory and as measured."""
    print(f"{'sent by a rank':14}{'theory':>8}{'measured':>10}{'calls':>7}")
    for entry in job.ledger():
        theory, measured = (sent / HERE["nproc"] / U for sent in (entry.theory or 0, entry.measured))
        print(f"{entry.op:14}{theory:6.2f} U{measured:8.2f} U{entry.calls:7g}")


traffic(ddp)

# %% [markdown]
# ## Stage 1: the optimizer state
#
# Each rank keeps the moments of its share of the parameters and steps only those. PyTorch has this as `ZeroRedundancyOptimizer`: DDP
# stays as it is, and one function of the script changes.

# %%
print(excerpt(Spec(strategy="zero1", workload="gpt", nproc=2), "build_optimizer"))

# %% [markdown]
# **Predict.** After the step each rank has new values for its share alone, and DDP wants all parameters on all ranks.
#
# 1. What must be sent that DDP does not send?
# 2. How many U does a step cost then?

# %%
zero1 = run("zero1", **GPT).wait()
beside(zero1, stage=1)
print()
traffic(zero1)

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# The new parameters: each rank broadcasts those that it stepped, one call for each tensor. That is 1 U more than DDP.
#
# It need not be so. The paper's stage 1 sends no more than DDP: gradients by reduce-scatter (1 U), since a rank that steps
# a share needs the mean of only that share, then the parameters by all-gather (1 U). PyTorch's optimizer stands behind DDP, which has
# already sent *all* gradients to *all* ranks.
#
# The measured state differs a little from rank to rank, because `ZeroRedundancyOptimizer` gives out whole tensors and cuts none.
#
# </details>

# %% [markdown]
# ## Stage 2: gradients too
#
# If a rank steps only its share, it needs only its share of the gradients: a **reduce-scatter** in place of the all-reduce. PyTorch has
# this in FSDP. `reshard_after_forward=False` says: gather the parameters once, and keep them until backward is done.
#
# (On CPU ranks FSDP2 needs torch 2.7. With an older one take FSDP1: `run("fsdp", **GPT, options={"sharding": "SHARD_GRAD_OP"})`, and
# below `run("fsdp", **GPT)`.)

# %%
zero2 = run("fsdp2", **GPT, options={"reshard_after_forward": False}).wait()
beside(zero2, stage=2)
print()
traffic(zero2)

# %% [markdown]
# Gradients and optimizer state are as predicted. Two things are not:
#
# 1. The parameters are *more* than the formula says. What lies beside the gathered copy?
# 2. On CPU ranks there is an all-reduce of 2 U where a reduce-scatter of 1 U was expected. Why?
#
# <details class="answer"><summary>Answer</summary>
#
# 1. The rank's own shard, 4P/n bytes. The optimizer steps the shard; forward and backward use the gathered copy. Between two steps
#    FSDP drops that copy, so it then holds less than stage 2 of the paper.
# 2. gloo, the backend of CPU ranks, does a reduce-scatter as an all-reduce of the whole and keeps one part. NCCL, on GPUs, has
#    a real one: there the step costs 2 U, as much as DDP.
#
# </details>
#
# The ledger of a run has the same in bytes, over all ranks, and says why where theory and measurement differ:

# %%
zero2.ledger()

# %% [markdown]
# ## Stage 3: parameters too
#
# Now no rank has the whole model. Before a layer is needed, the ranks gather it; when it is done, they drop it, and gather it again for
# backward. That is FSDP as it comes, and [lab 05](05_fsdp.py) is about how it can work at all.
#
# **Predict.** How many U does a step cost, with two gathers and one reduce-scatter?

# %%
zero3 = run("fsdp2", **GPT).wait()
beside(zero3, stage=3)
print()
traffic(zero3)

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# 3 U by theory, half as much again as DDP (4 on gloo, which makes 2 of the reduce-scatter). The parameters are above P/n by
# the one layer that is gathered at the moment.
#
# </details>
#
# What a stage costs and saves, in short:
#
# | | parameters | gradients | optimizer | bytes a rank | sent in a step |
# | --- | --- | --- | --- | --- | --- |
# | DDP | whole | whole | whole | 16P | 2 U |
# | ZeRO-1 | whole | whole | shard | 8P + 8P/n | 2 U (PyTorch's: 3 U) |
# | ZeRO-2 | whole | shard | shard | 4P + 12P/n | 2 U |
# | ZeRO-3 | shard | shard | shard | 16P/n | 3 U |
#
# The first two stages cost nothing on the wire when they are built as in the paper. The third costs half as much again, and is the only
# one that lets a model grow with the number of ranks.

# %% [markdown]
# ## Bytes against ranks
#
# The 7 billion parameters of the beginning, by formula. The dashed line is a device of 80 GB.

# %%
pictures.sharding.bytes_by_ranks(7e9, limit=80e9)

# %% [markdown]
# Which stage is the first to fit on two ranks? On four? And what does `bytes_by_ranks(30e9, limit=80e9)` say?
#
# <details class="answer"><summary>Answer</summary>
#
# On two ranks stage 2 (70 GB), though activations must fit into the rest; on four stage 1 (70 GB). With 30 billion parameters the
# parameters alone are 120 GB: stages 1 and 2 never fit, with any number of ranks. Stage 3 does from eight on (60 GB).
#
# </details>

# %% [markdown]
# ## What ZeRO does not make less

# %%
print(f"{'MB on a rank':10}{'states':>10}{'activations':>13}{'peak':>8}")
for name, job in {"DDP": ddp, "ZeRO-1": zero1, "ZeRO-2": zero2, "ZeRO-3": zero3}.items():
    states = sum(largest(job, part) for part in BYTES)
    peak = max(rank["peak_memory_bytes"] for rank in job.summary()["ranks"])
    print(f"{name:12}{states / 1e6:10.1f}{largest(job, 'activations') / 1e6:13.1f}{peak / 1e6:8.1f}")

# %% [markdown]
# Activations belong to the samples of a rank, and no sharding of model states touches them. With a large batch they are most
# of the memory, and all of this saves little. Buffers that stages need for sending come on top.
#
# (The states of a row are added up each at its own largest moment; the peak is one moment, at which not all of them are there.)

# %% [markdown]
# ## DeepSpeed: the same three stages
#
# DeepSpeed is where ZeRO comes from. Its engine takes model and optimizer, and a dictionary says the stage. It is an extra of this lab:
# where it is missing, the second cell below says in one line how to get it, and everything else goes on without it. It compiles a part
# of itself when it is first used, which can take some minutes on a small machine.

# %%
print(excerpt(Spec(strategy="deepspeed", workload="gpt", nproc=2, options={"stage": 2}), "STAGE", "parallelize"))

# %% tags=["long"]
engines = {}
try:
    for stage in (1, 2, 3):
        engines[stage] = run("deepspeed", **GPT, options={"stage": stage}).wait()
        print(f"\nDeepSpeed, stage {stage}")
        beside(engines[stage], stage)
        traffic(engines[stage])
except SpecError as missing:
    print(missing)

# %% [markdown]
# Compare with PyTorch, stage by stage. What is other than in the tables above?
#
# <details class="answer"><summary>Answer</summary>
#
# - **Parameters of stages 1 and 2.** The optimizer steps a 32-bit copy of the rank's shard, which lies beside the whole parameters:
#   4P + 4P/n. Where the parameters have 16 bits, that copy is part of the 12 bytes.
# - **Gradients of stage 1.** They are sharded already: stages 1 and 2 share their code in DeepSpeed and differ in *when* a rank lets go
#   of what is not its own. Gradients go out when a *bucket* of 500 million numbers is full, and this whole model fits into one. Its
#   2 GB are what `engines[2].figure("memory_by_owner")` shows as *other*: for a small model, set `reduce_bucket_size` lower.
# - **Gathers of stage 3.** It gathers once and not twice, because a model as small as this may stay whole until backward
#   (`stage3_max_live_parameters`, a thousand million). What is gathered counts among the activations here.
# - **Traffic of stages 1 and 2.** By theory it is DDP's. What comes on top is a matter of how whole buckets are added up: look at the
#   last column of `engines[2].ledger()`.
#
# </details>

# %% [markdown]
# ## Exercises
#
# **1.** Write `lowest_stage(parameters, ranks, memory)`: the lowest stage (0 for DDP, 1, 2 or 3) whose model states fit into `memory`
# bytes on each rank, or `None` where none does. Train in 16 bits, with 2 bytes for a parameter, 2 for its gradient, and 12 in
# the optimizer.


# %% tags=["exercise"]
def lowest_stage(parameters, ranks, memory): ...


check("zero.stage", lowest_stage)

# %% [markdown]
# **2.** Start a run of `gpt` in which every rank has *all* parameters between the steps, and *a quarter* of the optimizer
# state. Wait for its end: `run(…, **(GPT | place(…))).wait()`.

# %% tags=["exercise"]
quarter = ...
check("zero.quarter", quarter)
