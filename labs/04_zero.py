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
# # ZeRO: why store the same state n times?
#
# A model with 7 billion parameters, trained with Adam in 32 bits, needs 112 GB before it processes a single sample. A
# GPU with 80 GB cannot hold that. Four of them have 320 GB in total, but DDP on four of them fails at the same line:
# *out of memory*.
#
# **What fills the other 208 GB?** Answer before you go on. This lab removes the redundancy, one component after
# another. The cells of this lab compute for about 1 minute on two cores.

# %%
from labkit import Spec, SpecError, check, excerpt, guess, pictures, place, run, show

HERE = place(2)
GPT = {**HERE, "workload": "gpt", "batch_size": 2, "precision": "fp32", "steps": 10, "samples": 100}
print(HERE)

# %% [markdown]
# ## The model states
#
# For each parameter, a rank that trains with Adam in 32 bits stores
#
# | | bytes | |
# | --- | --- | --- |
# | the parameter | 4 | |
# | its gradient | 4 | from backward to the optimizer step |
# | Adam's two moments | 8 | from step to step |
#
# That is **16 bytes per parameter**, the *model states*. Training in 16 bits does not change the sum: 2 for the
# parameter, 2 for the gradient, and 12 in the optimizer, which stores a 32-bit copy in addition to its two moments. The
# paper writes 16Ψ. Those who also add the gradients up in 32 bits, as Megatron-LM does, need 18.
#
# Our model is small, so that two CPU ranks can hold it too. Its states:

# %%
model = Spec(strategy="ddp", workload="gpt", nproc=2)
P = model.workload_row.parameters(model.options)
BYTES = {"parameters": 4, "gradients": 4, "optimizer": 8}

print(f"{P:,} parameters")
for state, size in BYTES.items():
    print(f"{state:11} {size * P / 1e6:5.1f} MB")

# %% [markdown]
# ## Predict: three components that can be sharded
#
# ZeRO, the *zero redundancy optimizer*, has three stages. Each stage shards one more component across the ranks.

# %%
pictures.sharding.who_holds_what(ranks=4)

# %% [markdown]
# 1. Which component is sharded first, and why?
# 2. With four ranks, how much of the 16P bytes does stage 1 save? And stage 3?
# 3. With any number of ranks, to how many bytes can stage 1 reduce the states at best?
#
# <details class="answer"><summary>Answer</summary>
#
# 1. The optimizer state. It is half of the total, and only the rank that updates a parameter needs it.
# 2. Stage 1 saves 6P of 16P, stage 3 saves 12P.
# 3. To 8P, because parameters and gradients stay whole. Only stage 3 has no such lower bound.
#
# </details>

# %% [markdown]
# ## DDP: everything on every rank
#
# First, run the baseline for all comparisons. **Predict** its peak memory per rank: are the 16P bytes all of it? The
# run compares your number.

# %%
my_guess = guess("peak_mb", ...)  # MiB per rank
ddp = run("ddp", **GPT)
show(ddp)

# %%
ddp.wait()
my_guess

# %%
ddp.figure("memory_of_step")

# %% [markdown]
# The figure shows one step of one rank. Activations accumulate in forward and are freed in backward, while the
# gradients are computed. The components reach their maxima at different moments, so we compare each component at *its*
# maximum with the formula. (*Communication* is DDP's buckets: a second copy of the gradients, laid out for sending.)

# %%
SHARDED_FROM = {"optimizer": 1, "gradients": 2, "parameters": 3}  # the first stage that shards it


def largest(job, state):
    """Bytes of a state at its maximum within a step, on the rank that has the most of it."""
    return max(max(rank.memory_step.owners[state]) for rank in job.state.ranks.values())


# %%
def against_formula(job, stage):
    """Compares the formula for a stage of ZeRO with the measurement."""
    print(f"{'MB per rank':14}{'formula':>8}{'measured':>10}")
    for state, size in BYTES.items():
        shards = HERE["nproc"] if stage >= SHARDED_FROM[state] else 1
        print(f"{state:14}{size * P / shards / 1e6:8.2f}{largest(job, state) / 1e6:10.2f}")


against_formula(ddp, stage=0)

# %% [markdown]
# Now the **traffic**. To compare strategies, we define a unit: one **U** is what a rank sends when all parameters are
# all-gathered once, or all gradients are reduce-scattered once: (n−1)/n · 4P bytes. An all-reduce is a reduce-scatter
# and an all-gather, so it costs 2 U.

# %%
U = (HERE["nproc"] - 1) / HERE["nproc"] * 4 * P


def traffic(job):
    """Prints what a rank sends per step, in U: expected and measured."""
    print(f"{'sent per rank':14}{'expected':>9}{'measured':>10}{'calls':>7}")
    for entry in job.ledger():
        expected, measured = (sent / HERE["nproc"] / U for sent in (entry.theory or 0, entry.measured))
        print(f"{entry.op:14}{expected:7.2f} U{measured:8.2f} U{entry.calls:7g}")


traffic(ddp)

# %% [markdown]
# ## Stage 1: the optimizer state
#
# Each rank stores the moments of its shard of the parameters and updates only that shard. In PyTorch this is
# `ZeroRedundancyOptimizer`. DDP stays the same, and one function of the script changes.

# %%
excerpt(Spec(strategy="zero1", workload="gpt", nproc=2), "build_optimizer")

# %% [markdown]
# **Predict.** After the update, each rank has new values only for its shard, but DDP needs all parameters on all ranks.
#
# 1. What has to be sent that DDP does not send?
# 2. How many U does a step cost then? One U is `U / 2**20` MiB.

# %%
my_guess = guess("sent_mb", ...)  # MiB per rank and step: U / 2**20 times your number
zero1 = run("zero1", **GPT).wait()
against_formula(zero1, stage=1)
print()
traffic(zero1)
my_guess

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# The new parameters: each rank broadcasts those it has updated, with one call per tensor. That is 1 U more than DDP.
#
# This overhead is not inherent. Stage 1 of the paper sends no more than DDP: a reduce-scatter of the gradients (1 U),
# because a rank needs the mean gradient only for the shard it updates, and then an all-gather of the parameters (1 U).
# PyTorch's optimizer runs after DDP, which has already sent *all* gradients to *all* ranks.
#
# The measured state differs slightly from rank to rank, because `ZeroRedundancyOptimizer` assigns whole tensors and
# splits none.
#
# </details>

# %% [markdown]
# ## Stage 2: the gradients too
#
# If a rank updates only its shard, it needs only its shard of the gradients: a **reduce-scatter** instead of the
# all-reduce. In PyTorch this is part of FSDP. With `reshard_after_forward=False`, FSDP gathers the parameters once and
# keeps them until backward is done.
#
# (On CPU ranks, FSDP2 needs torch 2.7. With an older version use FSDP1:
# `run("fsdp", **GPT, options={"sharding": "SHARD_GRAD_OP"})`, and below `run("fsdp", **GPT)`.)

# %%
zero2 = run("fsdp2", **GPT, options={"reshard_after_forward": False}).wait()
against_formula(zero2, stage=2)
print()
traffic(zero2)

# %% [markdown]
# Gradients and optimizer state are as predicted. Two things are not:
#
# 1. The parameters take *more* than the formula says. What is stored in addition to the gathered copy?
# 2. On CPU ranks there is an all-reduce of 2 U instead of a reduce-scatter of 1 U. Why?
#
# <details class="answer"><summary>Answer</summary>
#
# 1. The rank's own shard, 4P/n bytes. The optimizer updates the shard; forward and backward use the gathered copy.
#    Between two steps FSDP frees that copy, so it then stores less than stage 2 of the paper.
# 2. gloo, the backend of CPU ranks, implements a reduce-scatter as an all-reduce of the whole and keeps one chunk.
#    NCCL, on GPUs, has a native reduce-scatter. There, a step costs 2 U, as much as DDP.
#
# </details>
#
# The ledger of a run shows the same in bytes, summed over all ranks, and explains each difference between expected and
# measured:

# %%
zero2.ledger()

# %% [markdown]
# ## Stage 3: the parameters too
#
# Now no rank stores the whole model. Before a layer computes, the ranks all-gather its parameters. Afterwards they free
# them, and gather them again for backward. This is the default behaviour of FSDP; [lab 05](05_fsdp.py) shows how it
# works.
#
# **Predict.** How many U does a step cost, with two all-gathers and one reduce-scatter?

# %%
my_guess = guess("sent_mb", ...)  # MiB per rank and step
zero3 = run("fsdp2", **GPT).wait()
against_formula(zero3, stage=3)
print()
traffic(zero3)
my_guess

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# 3 U are expected, 1.5 times the bytes of DDP in the same dtype (4 U on gloo, which sends 2 U for the reduce-scatter).
# The parameters exceed P/n by the one layer that is gathered at the moment.
#
# </details>
#
# What each stage stores and sends:
#
# | | parameters | gradients | optimizer | bytes per rank | sent per step |
# | --- | --- | --- | --- | --- | --- |
# | DDP | whole | whole | whole | 16P | 2 U |
# | ZeRO-1 | whole | whole | shard | 8P + 8P/n | 2 U (PyTorch's: 3 U) |
# | ZeRO-2 | whole | shard | shard | 4P + 12P/n | 2 U |
# | ZeRO-3 | shard | shard | shard | 16P/n | 3 U |
#
# The first two stages cause no additional traffic if they are implemented as in the paper. The third causes 1.5 times
# the traffic, and is the only one with which the model size can grow with the number of ranks.
#
# The factor 1.5 compares equal dtypes. Under `torch.autocast`, DDP keeps parameters and gradients in 32 bits and
# all-reduces 32-bit gradients: 2 · 4 bytes per parameter. FSDP2 with `param_dtype=torch.bfloat16` gathers 2 · 2 bytes
# and reduces in bf16 as well, unless `reduce_dtype` says otherwise: 2 bytes more, 6 in total, less than DDP. The lab's
# scripts reduce in 32 bits (`reduce_dtype=torch.float32`), because sums over many ranks lose digits in bf16: 8 bytes,
# as much as DDP.

# %% [markdown]
# ## Bytes versus ranks
#
# The 7 billion parameters from the beginning, by formula. The dashed line is a device with 80 GB.

# %%
pictures.sharding.bytes_by_ranks(7e9, limit=80e9)

# %% [markdown]
# What is the lowest stage that fits on two ranks? On four? And what does `bytes_by_ranks(30e9, limit=80e9)` show?
#
# <details class="answer"><summary>Answer</summary>
#
# On two ranks stage 2 (70 GB), if the activations fit into the rest; on four ranks stage 1 (70 GB). With 30 billion
# parameters, the parameters and gradients alone take 240 GB, and the parameters alone 120 GB: stages 1 and 2 never fit,
# with any number of ranks. Stage 3 fits on seven ranks (69 GB); six would be full without a single activation.
#
# </details>

# %% [markdown]
# ## What ZeRO does not reduce

# %%
print(f"{'MB per rank':11}{'states':>9}{'activations':>13}{'peak':>8}")
for name, job in {"DDP": ddp, "ZeRO-1": zero1, "ZeRO-2": zero2, "ZeRO-3": zero3}.items():
    states = sum(largest(job, state) for state in BYTES)
    peak = max(rank["peak_memory_bytes"] for rank in job.summary()["ranks"])
    print(f"{name:12}{states / 1e6:8.1f}{largest(job, 'activations') / 1e6:13.1f}{peak / 1e6:8.1f}")

# %% [markdown]
# Activations depend on the samples of a rank, and sharding the model states does not change them. With a large batch
# they take most of the memory, and ZeRO saves little. The communication buffers of the stages add to the total.
#
# (The column *states* adds the maximum of each state. The peak is a single moment, at which not all states are at their
# maximum.)

# %% [markdown]
# ## DeepSpeed: the same three stages
#
# ZeRO was introduced by DeepSpeed. Its engine takes the model and the optimizer, and a configuration dictionary selects
# the stage. DeepSpeed is an optional dependency of this lab: if it is missing, the second cell below prints one line
# that says how to install it, and the rest of the lab works without it.

# %%
excerpt(Spec(strategy="deepspeed", workload="gpt", nproc=2, options={"stage": 2}), "STAGE", "parallelize")

# %% tags=["long"]
engines = {}
try:
    for stage in (1, 2, 3):
        engines[stage] = run("deepspeed", **GPT, options={"stage": stage}).wait()
        print(f"\nDeepSpeed, stage {stage}")
        against_formula(engines[stage], stage)
        traffic(engines[stage])
except SpecError as missing:
    print(missing)

# %% [markdown]
# Compare with PyTorch, stage by stage. What differs from the tables above?
#
# <details class="answer"><summary>Answer</summary>
#
# - **Parameters of stages 1 and 2.** The optimizer updates a 32-bit copy of the rank's shard, stored in addition to the
#   whole parameters: 4P + 4P/n. If the parameters have 16 bits, that copy is part of the 12 bytes.
# - **Gradients of stage 1.** They are already sharded: stages 1 and 2 share their code in DeepSpeed and differ in
#   *when* a rank frees the gradients outside its shard. Gradients are sent when a *bucket* of 500 million numbers is
#   full, and this whole model fits into one. Its 2 GB appear as *other* in `engines[2].figure("memory_by_owner")`. For
#   a small model, reduce `reduce_bucket_size`.
# - **All-gathers of stage 3.** It gathers once instead of twice, because a model as small as this one may stay gathered
#   until backward (`stage3_max_live_parameters`, one billion). The gathered parameters count as activations here.
# - **Traffic of stages 1 and 2.** The expected traffic is that of DDP. The excess depends on how whole buckets are
#   reduced: see the last column of `engines[2].ledger()`.
#
# </details>

# %% [markdown]
# ## Exercises
#
# **1.** Write `lowest_stage(parameters, ranks, memory)`: the lowest stage (0 for DDP, 1, 2 or 3) whose model states fit
# into `memory` bytes on each rank, or `None` if no stage fits. Train in 16 bits, with 2 bytes for a parameter, 2 for
# its gradient, and 12 in the optimizer.


# %% tags=["exercise"]
def lowest_stage(parameters, ranks, memory): ...


check("zero.stage", lowest_stage)

# %% [markdown]
# **2.** Start a run of `gpt` in which every rank stores *all* parameters between the steps and *a quarter* of the
# optimizer state. Wait until it ends: `run(…, **(GPT | place(…))).wait()`.

# %% tags=["exercise"]
quarter = ...
check("zero.quarter", quarter)
