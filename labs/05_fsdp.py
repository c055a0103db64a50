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
# # FSDP: train a model that no rank stores completely
#
# With *fully sharded data parallel*, every rank stores only 1/n of the parameters. But a layer cannot compute with a
# shard of its matrix, and every rank computes *all* layers, on its own samples.
#
# **How does a rank get the rest?** And why does it not end up with the whole model in memory? Write down your guess.
# The cells of this lab compute for about 1 minute on two cores.

# %%
from labkit import Spec, check, diff_scripts, excerpt, guess, pictures, place, run, show

HERE = place(2)
# %load_ext labkit
GPT = {**HERE, "workload": "gpt", "batch_size": 2, "precision": "fp32", "steps": 10, "samples": 100}
print(HERE)

# %% [markdown]
# ## Gather, compute, free
#
# The model is divided into **units**, usually its layers. Before a unit computes, the ranks **all-gather** its
# parameters from their shards. After it has computed, they **free** everything except their own shards (*reshard*).
# Backward needs the parameters again, so they are gathered again. Then a **reduce-scatter** sums the gradients over the
# ranks and gives each rank its shard of the sum.
#
# The picture is a model with six units and four ranks. The lower part shows how much of the parameters one rank has in
# memory.

# %%
pictures.sharding.gather_compute_drop(units=6, ranks=4)

# %% [markdown]
# 1. How many units are whole at the same time, and why not only one?
# 2. Find a moment at which the rank waits for an all-gather.
# 3. `gather_compute_drop(units=6, ranks=4, prefetch=0)` does not prefetch. What improves, and what gets worse?
#
# <details class="answer"><summary>Answer</summary>
#
# 1. Two: while one unit computes, the next is already gathered (prefetched), so that the computation does not wait.
# 2. At the very beginning, for unit 1, and once in the middle: the last unit is freed after forward and gathered again
#    at once.
# 3. It needs less memory, because only one unit is whole. But every all-gather is now exposed: the computation waits
#    for it.
#
# </details>

# %% [markdown]
# ## One unit by hand
#
# Now do the three steps yourself, one per cell. Two ranks **stay** for these cells, with their variables:
# `%%torchrun 2 --keep` starts them, and `%%ranks` runs a cell on them. `fully_shard` makes a unit of a module: here of
# each of two layers, and of the rest.

# %%
# %%torchrun 2 --keep
from torch import nn
from torch.distributed.fsdp import fully_shard

mesh = dist.init_device_mesh(device.type, (world_size,))
model = nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.ReLU(), nn.Linear(1000, 1000, bias=False)).to(device)
for module in (model[0], model[2], model):
    fully_shard(module, mesh=mesh)
shard = model[0].weight
print(f"{type(shard).__name__} {tuple(shard.shape)}, here {tuple(shard.to_local().shape)}")

# %% [markdown]
# A matrix of 1,000 × 1,000 numbers takes 4 MB, and each rank has 2 MB of it. **Gather** the first layer:

# %%
# %%ranks
model[0].unshard()
whole = model[0].weight
print(f"{type(whole).__name__} {tuple(whole.shape)}, {whole.untyped_storage().nbytes() / 1e6} MB")

# %% [markdown]
# Now **free** it. **Predict:** the variable `whole` still refers to the gathered matrix. Does that keep 4 MB in memory?

# %%
# %%ranks
model[0].reshard()
print(f"{type(model[0].weight).__name__}; whole: {tuple(whole.shape)}, {whole.untyped_storage().nbytes() / 1e6} MB")

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# No. FSDP frees the *storage* of the tensor, and the tensor stays, with its shape and 0 MB. The next all-gather fills
# the same tensor again: autograd, which has stored it for backward, then finds the right numbers in it.
#
# </details>
#
# In training you call neither: the first of the two calls is made before a unit computes, the second one after it.
# **Predict:** how many MB of each layer does a rank have when the first layer computes, when the second one does, and
# afterwards? And how many rows has the gradient of a matrix?


# %%
# %%ranks
def print_held(module, inputs=None):
    weights = [layer.weight for layer in (model[0], model[2])]
    print([(w.to_local() if hasattr(w, "to_local") else w).nbytes / 1e6 for w in weights], "MB")


for layer in (model[0], model[2]):
    layer.register_forward_pre_hook(print_held)
y = model(torch.randn(8, 1000, device=device))
print_held(model)
y.sum().backward()
print("gradient here:", tuple(shard.grad.to_local().shape))

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# [4, 2], then [2, 4], then [2, 2]: the sum of the two is never 8. After backward a rank has the gradient of its 500
# rows only, averaged over the ranks: a reduce-scatter does not give it the others. The optimizer needs no more.
#
# </details>

# %%
# %ranks stop

# %% [markdown]
# ## The code
#
# `fully_shard` turns a module into a unit: here every block of the model as soon as it is built, so that no rank ever
# holds the whole model, and then the model itself, which takes the remaining parameters. (On CPU ranks it needs torch
# 2.7. With an older version, labkit rejects the run with a message that says so.)

# %%
excerpt(Spec(strategy="fsdp2", workload="gpt", nproc=2), "parallelize")

# %% [markdown]
# **Predict.** The model consists of an embedding, five layers and a head: seven units with parameters. On two ranks:
#
# 1. How many all-gathers are there per step? How many reduce-scatters?
# 2. What is the maximum of the parameters that a rank has in memory? The largest unit is a layer.
# 3. How many MiB does a rank send per step? An all-gather or a reduce-scatter of all parameters sends half of them.

# %%
spec = Spec(strategy="fsdp2", workload="gpt", nproc=2)
P = spec.workload_row.parameters(spec.options)
LAYER = 12 * 128**2 + 13 * 128  # the matrices of attention and MLP; biases and norms
print(
    f"all parameters {4 * P / 1e6:.2f} MB, own shards {4 * P / 2 / 1e6:.2f} MB, a whole layer {4 * LAYER / 1e6:.2f} MB"
)

# %%
my_guess = guess("sent_mb", ...)  # MiB per rank and step
fsdp2 = run("fsdp2", **GPT)
show(fsdp2)

# %% [markdown]
# The timeline shows one step of both ranks. Look for all-gathers in forward and in backward, and for the gradients sent
# after each unit. If a rank neither computes nor communicates, it waits for the other.

# %%
fsdp2.wait()
fsdp2.figure("timeline")

# %% [markdown]
# Now the memory of that step. The band of parameters has spikes: each spike is a unit that was gathered and freed.

# %%
fsdp2.figure("memory_of_step")


# %%
def most(job, owner):
    """MB of an owner of memory at its maximum within a step, on the rank that has the most of it."""
    return max(max(rank.memory_step.owners[owner]) for rank in job.state.ranks.values()) / 1e6


def calls(job):
    """How often a rank calls each collective per step."""
    return {entry.op: round(entry.calls) for entry in job.ledger()}


print(f"parameters: at most {most(fsdp2, 'parameters'):.2f} MB; calls per step: {calls(fsdp2)}")
my_guess

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# There are fourteen all-gathers, two per unit, and seven reductions of gradients: three times half of the parameters,
# or four times on gloo (see below). The maximum of the parameters is the
# rank's own shards plus one layer. Prefetched parameters do not count as parameters yet: until they are used, they are
# in the buffer of the all-gather, which the figure shows as *communication*.
#
# </details>
#
# ### What the ledger says

# %%
fsdp2.ledger()

# %% [markdown]
# FSDP does **not** all-reduce gradients: a rank needs only its shard of the sum, and a reduce-scatter sends half as
# much. If the ledger shows an all-reduce anyway, the ranks are CPU ranks: *gloo* implements a reduce-scatter as an
# all-reduce and discards the rest. The last column of the ledger gives the reason. With NCCL, on GPUs, it is a
# reduce-scatter.

# %% [markdown]
# ## Without resharding
#
# `reshard_after_forward=False` keeps the gathered parameters until backward is done. **Predict** the number of
# all-gathers, the maximum of the parameters, and the traffic.

# %%
pictures.sharding.gather_compute_drop(units=7, ranks=2, reshard=False)

# %%
my_guess = guess("sent_mb", ...)  # MiB per rank and step
kept = run("fsdp2", **GPT, options={"reshard_after_forward": False}).wait()
for name, job in {"reshard": fsdp2, "keep": kept}.items():
    print(f"{name}: parameters at most {most(job, 'parameters'):.2f} MB, {calls(job)}")
my_guess

# %% [markdown]
# <details class="answer"><summary>What is gained, and what does it cost?</summary>
#
# Half of the all-gathers are gone. At the end of forward, a rank has every unit whole *and* its own shards: more
# parameters than DDP. This is worth it if there is enough memory and the interconnect is slow. Gradients and optimizer
# state stay sharded.
#
# </details>
#
# | sharding | parameters within a step | gradients, optimizer | sent per step | FSDP1 | FSDP2 |
# | --- | --- | --- | --- | --- | --- |
# | ZeRO-3 (full) | shard + 1 or 2 units | shard | 2 all-gathers, 1 reduce-scatter | `FULL_SHARD` | default |
# | ZeRO-2 | whole + shard | shard | 1 all-gather, 1 reduce-scatter | `SHARD_GRAD_OP` | `reshard_after_forward=False` |
# | DDP (none) | whole | whole | 1 all-reduce | `NO_SHARD` | – |
# | HSDP (hybrid) | as full | shard in a group | as full, all-reduce between groups | `HYBRID_SHARD` | 2D mesh |
#
# Hybrid sharding is for several machines: the all-gathers stay within a machine, on the fast interconnect. Here are two
# groups of two ranks:

# %% tags=["long"]
hybrid = run("fsdp2", **(GPT | place(4)), options={"replicas": 2}).wait()
print(f"4 ranks, 2 replicas: parameters at most {most(hybrid, 'parameters'):.2f} MB, as on 2 ranks")
hybrid.ledger()

# %% [markdown]
# ## How large should a unit be?
#
# FSDP1 finds its units with a **wrap policy**. The usual policy goes by size: a module becomes a unit as soon as it has
# `min_num_params` parameters that do not belong to a unit inside it. The remaining parameters belong to the root, which
# is also a unit.
#
# **Predict:** what does a threshold of ten million do to a model with one million parameters?

# %%
excerpt(Spec(strategy="fsdp", workload="gpt", nproc=2), "MIN_PARAMETERS", "parallelize")

# %%
one = run("fsdp", **GPT, options={"min_parameters": 10_000_000}).wait()
one.findings()

# %%
small = run("fsdp", **GPT, options={"min_parameters": 20_000}).wait()
for name, job in {"10,000,000": one, "20,000": small}.items():
    units = job.state.ranks[0].models[-1].units
    print(f"threshold {name:>10}: {units:2} units, parameters at most {most(job, 'parameters'):.2f} MB, {calls(job)}")

# %% [markdown]
# <details class="answer"><summary>Why is neither optimal?</summary>
#
# A single unit is gathered as a whole at the beginning: the parameters take more than under DDP, and no computation
# overlaps with the all-gather. Many small units take the least memory, but every collective costs latency, and for
# small ones latency is almost the whole cost. One unit per transformer layer is the usual choice.
#
# PyTorch does not warn about the first case. The default of its size policy is 100 million parameters; a smaller model
# is a single unit.
#
# </details>

# %% [markdown]
# ## FSDP1 and FSDP2
#
# FSDP1 concatenates all parameters of a unit into one **flat parameter** and shards that. FSDP2 shards **every
# parameter** along its rows, and each shard is a `DTensor` that knows the tensor it belongs to. Here is a layer with 6
# × 4 weights and 4 biases under both:

# %%
# %%torchrun 2
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

flat = FullyShardedDataParallel(nn.Linear(6, 4), device_id=device)
sharded = nn.Linear(6, 4).to(device)
fully_shard(sharded, mesh=dist.init_device_mesh(device.type, (world_size,)))

report(
    fsdp1=[f"{name}: {tuple(p.shape)}" for name, p in flat.named_parameters()],
    fsdp2=[f"{name}: {tuple(p.to_local().shape)} of {tuple(p.shape)}" for name, p in sharded.named_parameters()],
)

# %% [markdown]
# | | FSDP1 | FSDP2 |
# | --- | --- | --- |
# | what it is | a wrapper around the model | changes the modules in place; names stay the same |
# | a shard | a range of one flat parameter, across matrices | rows of each parameter, a `DTensor` |
# | units | found by a wrap policy | one per call of `fully_shard` |
# | frozen and trained parameters | `use_orig_params=True`, one dtype per unit | each parameter separately |
# | with tensor parallelism | awkward | a `DTensor` on a 2D mesh |
# | checkpoints | whole, flat or sharded (`state_dict_type`) | `DTensor`s, which any number of ranks can load |
#
# FSDP1 still works, and most tutorials show it. PyTorch recommends FSDP2 for new code. In our scripts this is the whole
# difference:

# %%
diff_scripts(Spec(strategy="fsdp", workload="gpt", nproc=2), Spec(strategy="fsdp2", workload="gpt", nproc=2))

# %% [markdown]
# ## When FSDP helps, and when it only costs
#
# Compare with DDP for two models: our transformer with two samples per rank, and the CNN of lab 00 with 128.
# **Predict** for both: by how much does the peak memory of a rank drop? Which step takes longer? The cell below guesses
# that FSDP2 halves the peak of the CNN.


# %%
def line(name, job):
    """Prints the peak memory of a rank, its activations, and the step time."""
    rank = job.summary()["ranks"][0]
    peak, step = rank["peak_memory_bytes"] / 1e6, 1e3 * rank["step_seconds_median"]
    print(f"{name:11} peak {peak:6.1f} MB, activations {most(job, 'activations'):6.1f} MB, {step:6.0f} ms per step")


# %%
line("gpt  DDP", run("ddp", **GPT).wait())
line("gpt  FSDP2", fsdp2)
whole = run("ddp", **HERE, workload="cnn", steps=4).wait()
line("cnn  DDP", whole)

# %%
my_guess = guess("peak_mb", ...)  # MiB per rank
line("cnn  FSDP2", run("fsdp2", **HERE, workload="cnn", steps=4).wait())
my_guess

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# FSDP shards only the model states. The transformer has few samples and many parameters, so its peak drops
# considerably. The CNN's memory is mostly activations, which belong to the samples: FSDP saves almost nothing and still
# pays for all collectives.
#
# The transformer's step takes longer: a few large all-reduces became many small collectives, with little computation
# between them. The CNN computes a lot for every byte it sends, so there the difference may be smaller than the noise of
# the machine. On GPUs with a fast interconnect and large layers, the all-gathers overlap with computation and cost
# little.
#
# FSDP can also make a step faster: each rank updates only its shard, so the optimizer step takes 1/n of the time. And
# with bf16 parameters and gradients it sends fewer bytes than DDP under autocast, which sends 32-bit gradients (lab
# 04).
#
# So if the model fits with DDP, start with DDP, and measure before you change it. FSDP is for models that do not fit.
#
# </details>
#
# The larger the model is relative to its batch, the closer the peak gets to half. With ten times the parameters:

# %% tags=["long"]
for name in ("DDP", "FSDP2"):
    line(f"10M  {name}", run(name.lower(), **GPT, options={"size": "10M"}).wait())

# %% [markdown]
# ## Exercises
#
# **1.** Write `most_held(units, ranks, ahead)`: the maximum number of parameters that a rank has in memory under FSDP.
# `units` lists the number of parameters of each unit, in model order. `ahead` units are prefetched, and each unit stays
# whole until it has computed. Remember what a rank stores all the time.


# %% tags=["exercise"]
def most_held(units, ranks, ahead): ...


check("fsdp.held", most_held)

# %% [markdown]
# **2.** Find a threshold with which FSDP1 makes one unit of each of the five layers, and no units inside them: six
# units with the root. Start that run: `run("fsdp", **GPT, options={"min_parameters": …}).wait()`. This is a layer:

# %%
excerpt(Spec(strategy="fsdp", workload="gpt", nproc=2), "WIDTH", "Layer", "Attention")

# %% tags=["exercise"]
layers = ...
check("fsdp.units", layers)
