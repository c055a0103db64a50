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
# # FSDP: train a model that no rank holds
#
# Under *fully sharded data parallel* every rank keeps 1/n of the parameters, and no more. But a layer cannot be computed with a part of
# its matrix, and every rank computes *all* layers, on samples of its own.
#
# **How does it come by the rest?** And what stops it from holding the whole model again? Write down your guess.

# %%
from labkit import Spec, check, diff_scripts, excerpt, pictures, place, run, show

HERE = place(2)
GPT = {**HERE, "workload": "gpt", "batch_size": 2, "precision": "fp32", "steps": 10, "samples": 100}
print(HERE)

# %% [markdown]
# ## Gather, compute, drop
#
# The model is cut into **units**, usually its layers. Before a unit computes, the ranks **gather** it from their shards (all-gather);
# when it has computed, they **drop** what is not their own. Backward needs it once more, so it is gathered again; then its gradients
# are added up over the ranks and cut into shards in one go (**reduce-scatter**).
#
# The picture is a model, with six units and four ranks. Below is how much of the parameters one rank has in memory.

# %%
pictures.sharding.gather_compute_drop(units=6, ranks=4)

# %% [markdown]
# 1. How many units are whole at the same time, and why not only one?
# 2. Find a moment at which the rank waits for a gather.
# 3. `gather_compute_drop(units=6, ranks=4, prefetch=0)` gathers nothing ahead. What gets better, what worse?
#
# <details class="answer"><summary>Answer</summary>
#
# 1. Two: while one computes, the next is gathered already, so that nobody waits.
# 2. At the very beginning, for unit 1, and once in the middle: the last unit is dropped after forward and gathered anew at once.
# 3. Less memory, since only one unit is whole; but every gather is now a pause in the computing.
#
# </details>

# %% [markdown]
# ## The code
#
# `fully_shard` makes a unit of a module: here of every block of the model, and then of the model itself, which takes what is left. (On
# CPU ranks it needs torch 2.7; an older torch is refused with a sentence that says so.)

# %%
print(excerpt(Spec(strategy="fsdp2", workload="gpt", nproc=2), "parallelize"))

# %% [markdown]
# **Predict.** The model is an embedding, five layers and a head: seven units with parameters. On two ranks:
#
# 1. How many all-gathers are there in a step? How many reduce-scatters?
# 2. What is the most of the parameters that a rank has at once? A layer is the largest unit.

# %%
spec = Spec(strategy="fsdp2", workload="gpt", nproc=2)
P = spec.workload_row.parameters(spec.options)
LAYER = 12 * 128**2 + 13 * 128  # the matrices of attention and perceptron, and biases and norms
print(f"all parameters {4 * P / 1e6:.2f} MB, own shards {4 * P / 2 / 1e6:.2f} MB, a whole layer {4 * LAYER / 1e6:.2f} MB")

# %%
fsdp2 = run("fsdp2", **GPT)
show(fsdp2)

# %% [markdown]
# One step of both ranks. Look for all-gathers in forward and in backward, and for gradients that go out behind each unit. Where a rank
# neither computes nor sends, it waits for the other.

# %%
fsdp2.wait()
fsdp2.figure("timeline")

# %% [markdown]
# And the memory of that step. The band of parameters has teeth: each is a unit that was gathered and dropped.

# %%
fsdp2.figure("memory_of_step")


# %%
def most(job, part):
    """MB of a part where it is largest within a step, on the rank that has most of it."""
    return max(max(rank.memory_step["owners"][part]) for rank in job.state.ranks.values()) / 1e6


def calls(job):
    """How often a rank called each collective in a step."""
    return {entry.op: round(entry.calls) for entry in job.ledger()}


print(f"parameters: {most(fsdp2, 'parameters'):.2f} MB at the most; calls of a step: {calls(fsdp2)}")

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# Fourteen all-gathers, two for each unit, and seven times gradients. The most of the parameters is the own shards and one layer. What
# is gathered ahead does not count as parameters yet: until its turn it lies in the buffer of the all-gather, which the figure shows as
# *communication*.
#
# </details>
#
# ### What the ledger says

# %%
fsdp2.ledger()

# %% [markdown]
# FSDP does **not** synchronise gradients by all-reduce: a rank needs the sums of its own shard alone, and a reduce-scatter sends half as
# much. If the ledger shows an all-reduce all the same, the ranks are CPU ranks: *gloo* does a reduce-scatter as an all-reduce and throws
# the rest away. The reason stands in its last column. With NCCL, on GPUs, it is a reduce-scatter.

# %% [markdown]
# ## Do not drop
#
# `reshard_after_forward=False` keeps what was gathered until backward is done. **Predict** the number of all-gathers and the most of
# the parameters.

# %%
pictures.sharding.gather_compute_drop(units=7, ranks=2, reshard=False)

# %%
kept = run("fsdp2", **GPT, options={"reshard_after_forward": False}).wait()
for name, job in {"drop": fsdp2, "keep": kept}.items():
    print(f"{name}: parameters {most(job, 'parameters'):.2f} MB at the most, {calls(job)}")

# %% [markdown]
# <details class="answer"><summary>What was bought, and for how much?</summary>
#
# Half of the all-gathers are gone. At the end of forward a rank has every unit whole *and* its own shards: more parameters than DDP. It is
# worth it where memory is free and the wire is slow. Gradients and optimizer state stay in shards.
#
# </details>
#
# | sharding | parameters in a step | gradients, optimizer | sent in a step | FSDP1 | FSDP2 |
# | --- | --- | --- | --- | --- | --- |
# | full (ZeRO-3) | shard + a unit or two | shard | 2 all-gathers, 1 reduce-scatter | `FULL_SHARD` | as it comes |
# | gradients (ZeRO-2) | whole + shard | shard | 1 all-gather, 1 reduce-scatter | `SHARD_GRAD_OP` | `reshard_after_forward=False` |
# | none (DDP) | whole | whole | 1 all-reduce | `NO_SHARD` | – |
# | hybrid (HSDP) | as full | shard in a group | the same in a group, 1 all-reduce between | `HYBRID_SHARD` | a mesh of two dimensions |
#
# Hybrid is for several machines: gathers stay inside a machine, where the wire is fast. Here two groups of two:

# %% tags=["long"]
hybrid = run("fsdp2", **(GPT | place(4)), options={"replicas": 2}).wait()
print(f"4 ranks, 2 replicas: parameters {most(hybrid, 'parameters'):.2f} MB at the most, as on 2 ranks")
hybrid.ledger()

# %% [markdown]
# ## How large is a unit?
#
# FSDP1 finds its units by a **wrap policy**. The usual one goes by size: a part of the model becomes a unit as soon as it has
# `min_num_params` parameters that no unit inside it has taken; what is left over belongs to the root, which is a unit too.
#
# **Predict** what a threshold of ten million does to a model of one million.

# %%
print(excerpt(Spec(strategy="fsdp", workload="gpt", nproc=2), "MIN_PARAMETERS", "parallelize"))

# %%
one = run("fsdp", **GPT, options={"min_parameters": 10_000_000}).wait()
one.findings()

# %%
small = run("fsdp", **GPT, options={"min_parameters": 20_000}).wait()
for name, job in {"10,000,000": one, "20,000": small}.items():
    units = job.state.ranks[0].seen("model")[-1]["units"]
    print(f"threshold {name:>10}: {units:2} units, parameters {most(job, 'parameters'):.2f} MB at the most, {calls(job)}")

# %% [markdown]
# <details class="answer"><summary>Why is neither the best?</summary>
#
# One unit is gathered whole at the beginning: the parameters are above those of DDP, and nothing can be computed meanwhile. Many
# small units hold least, but every collective costs its latency, and small ones cost hardly anything else. A layer of a transformer is the
# usual measure.
#
# Nothing warns of the first case in PyTorch. The default of its size policy is 100 million parameters: below that, FSDP1 has one unit.
#
# </details>

# %% [markdown]
# ## FSDP1 and FSDP2
#
# FSDP1 puts all parameters of a unit into one **flat parameter** and cuts that; FSDP2 cuts **every parameter** along its
# rows, and each piece is a `DTensor` that knows what it is a piece of. A layer of 6 × 4 numbers and 4 of bias, under both:

# %%
# %load_ext labkit

# %%
# %%torchrun 2
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

flat = FullyShardedDataParallel(nn.Linear(6, 4), device_id=device)
cut = nn.Linear(6, 4).to(device)
fully_shard(cut, mesh=dist.init_device_mesh(device.type, (world_size,)))

report(
    fsdp1=[f"{name}: {tuple(p.shape)}" for name, p in flat.named_parameters()],
    fsdp2=[f"{name}: {tuple(p.to_local().shape)} of {tuple(p.shape)}" for name, p in cut.named_parameters()],
)

# %% [markdown]
# | | FSDP1 | FSDP2 |
# | --- | --- | --- |
# | what it is | a wrapper around the model | changes the modules in place; names stay as they were |
# | a shard | a stretch of one flat parameter, across matrices | rows of each parameter, a `DTensor` |
# | units | a wrap policy finds them | each call of `fully_shard` is one |
# | frozen and trained parameters, several dtypes in a unit | awkward | each parameter for itself |
# | with tensor parallelism | awkward | a `DTensor` on a mesh of two dimensions |
# | checkpoints | of flat parameters, or gathered | each rank writes its `DTensor`s; other numbers of ranks can read them |
#
# FSDP1 still runs, and most tutorials show it; PyTorch recommends FSDP2 for anything new. In our scripts this is the whole difference:

# %%
print(diff_scripts(Spec(strategy="fsdp", workload="gpt", nproc=2), Spec(strategy="fsdp2", workload="gpt", nproc=2)))

# %% [markdown]
# ## When it wins, and when it only costs
#
# The same on DDP, for two models: our transformer with two samples a rank, and the CNN of lab 00 with 128. **Predict** for both:
# by how much does the peak of a rank fall? Which step is longer?


# %%
def line(name, job):
    """Peak of a rank, how much of it are activations, and a step's time."""
    rank = job.summary()["ranks"][0]
    peak, step = rank["peak_memory_bytes"] / 1e6, 1e3 * rank["step_seconds_median"]
    print(f"{name:11} peak {peak:6.1f} MB, activations {most(job, 'activations'):6.1f} MB, {step:6.0f} ms a step")


# %%
line("gpt  DDP", run("ddp", **GPT).wait())
line("gpt  FSDP2", fsdp2)
for name in ("DDP", "FSDP2"):
    line(f"cnn  {name}", run(name.lower(), **HERE, workload="cnn", steps=10).wait())

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# FSDP shards the model states and nothing else. The transformer has few samples and many parameters, so its peak falls by a good part.
# The CNN's memory is activations, which belong to the samples: hardly anything is saved, and all collectives are paid for.
#
# By itself FSDP never wins time. The transformer's step grows: a few large all-reduces became many small calls, with little to compute
# between them. The CNN computes much for every byte it sends, so there the difference may drown in the machine's mood. On GPUs with a
# fast wire and large layers the gathers lie beside the computing, and little is left of it.
#
# So: if the model fits with DDP, use DDP. FSDP is for what does not fit.
#
# </details>
#
# The larger the model beside its batch, the nearer the peak comes to half. With ten times the parameters:

# %% tags=["long"]
for name in ("DDP", "FSDP2"):
    line(f"10M  {name}", run(name.lower(), **GPT, options={"size": "10M"}).wait())

# %% [markdown]
# ## Exercises
#
# **1.** Write `most_held(units, ranks, ahead)`: the most parameters that a rank has at once under FSDP. `units` has the
# number of parameters of each unit, in the order of the model; `ahead` units are gathered before their turn, and all are whole until
# their turn is over. Do not forget what a rank always has.


# %% tags=["exercise"]
def most_held(units, ranks, ahead): ...


check("fsdp.held", most_held)

# %% [markdown]
# **2.** Find a threshold with which FSDP1 makes a unit of each of the five layers, and none inside them: six units with the root. Start
# that run: `run("fsdp", **GPT, options={"min_parameters": …}).wait()`. What is in a layer:

# %%
print(excerpt(Spec(strategy="fsdp", workload="gpt", nproc=2), "WIDTH", "Layer", "Attention"))

# %% tags=["exercise"]
layers = ...
check("fsdp.units", layers)
