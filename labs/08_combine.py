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
# # Combine: meshes, and which axis goes over which wire
#
# Data parallel, sharded, tensor parallel, pipeline: large models are trained with several of them at once. The ranks stand in a
# **mesh**, and each way to split has an **axis** of its own. **You have two machines with eight GPUs each, a fast wire inside of them
# and a slow one between them. Which axis should run along which wire?**

# %%
from labkit import Lab, Spec, check, excerpt, pictures, place, run

HERE = place(4)  # four GPUs where there are as many, else four CPU ranks
mesh = pictures.mesh

# %% [markdown]
# ## Ranks on a grid
#
# Four ranks, two axes: `tp` splits layers between neighbours, `dp` the batch. The same ranks are drawn once for each axis. Those of one
# letter and colour form a group: along *that* axis they talk to each other, and to nobody else.

# %%
mesh.grid({"dp": 2, "tp": 2})

# %% [markdown]
# In the script this is one call. The *last* axis has neighbours: ranks 0 and 1 differ in `tp`.

# %%
both = Spec(strategy="fsdp2_tp", workload="gpt", **HERE, steps=10, samples=200, batch_size=4)
print(excerpt(both, "mesh", "parallelize"))

# %% [markdown]
# **Predict:** of these four ranks, which have the same samples? Which have the same part of a layer?
#
# <details class="answer"><summary>Answer</summary>
#
# The same samples: ranks of a `tp` group, 0 and 1, 2 and 3. The same part of a layer: ranks of a `dp` group, 0 and 2, 1 and 3; FSDP2
# shards that part between them.
#
# </details>
#
# ## HSDP: replicas of shards
#
# FSDP on many machines gathers every block over the slow wire. *Hybrid* sharding (HSDP) shards inside a machine only, and lets the
# machines be replicas: between them only gradients are averaged, of which each rank has a shard. Two machines with four GPUs each:

# %%
mesh.grid({"replicate": 2, "shard": 4}, per_node=4)

# %% [markdown]
# **Predict** for *r* replicas of *s* shards and *P* parameters of 4 bytes: how many bytes does one rank send in a step along each
# axis, with FSDP over all ranks, and with HSDP?

# %%
P = Spec(strategy="fsdp2", workload="gpt", nproc=4).workload_row.parameters({"size": "1M", "context": 128})


def hsdp(r, s):
    shard = 3 * (s - 1) / s * 4 * P  # all-gather, all-gather, reduce-scatter
    replicate = 2 * (r - 1) / r * 4 * P / s  # all-reduce of a shard
    return {"replicate": replicate, "shard": shard}


def mib(sent):
    return "  ".join(f"{axis} {bytes_ / 2**20:.2f} MiB" for axis, bytes_ in sent.items())


print("FSDP, 1 × 4:", mib(hsdp(1, 4)))
print("HSDP, 2 × 2:", mib(hsdp(2, 2)))

# %% [markdown]
# Now on four ranks. `by_axis` counts what rank 0 sent in one step, group by group, as its timeline has it.

# %%
hybrid = Spec(strategy="fsdp2", workload="gpt", **HERE, steps=10, samples=200, batch_size=4, precision="fp32", options={"replicas": 2})
job = run(hybrid).wait()
print(mib(mesh.by_axis(job, {"replicate": 2, "shard": 2})))

# %% [markdown]
# <details class="answer"><summary>Was it as predicted?</summary>
#
# Over NCCL, yes. gloo, which carries the messages of CPU ranks, does a reduce-scatter as an all-reduce: it sends 2 instead of 1 of
# the three parts along `shard`, so that there are four. `job.ledger()` has the same with all reasons, over all ranks.
#
# </details>
#
# ## FSDP with tensor parallelism
#
# **Predict:** on the mesh of 2 × 2, which axis carries more in a step: activations along `tp`, or parameters and gradients along
# `dp`? The GPT has 5 layers of width 128, a rank has 4 windows of 128 places.

# %%
layers, width, places, batch, vocabulary = 5, 128, 128, 4, 256
activation = 4 * batch * places * width
tp = 2 * (2 - 1) / 2 * activation * (4 * layers + 1) + (2 - 1) / 2 * 4 * batch * places * vocabulary  # lab 06, and the logits
dp = 3 * (2 - 1) / 2 * 4 * P / 2  # as FSDP, of half the parameters
print(mib({"dp": dp, "tp": tp}))

# %%
split = run(both).wait()
print(mib(mesh.by_axis(split, {"dp": 2, "tp": 2})))

# %% [markdown]
# Was it more than predicted? The ledger says why, with a number for each reason. Its figures are those of all four ranks.

# %%
split.ledger()

# %% [markdown]
# Bytes are not all. What goes along `dp` can hide behind computing, on a device that computes while it sends: the next block is gathered
# while this one computes. What goes along `tp` cannot hide: the next matrix waits for it.

# %%
split.figure("timeline")

# %% [markdown]
# ## Three axes
#
# A pipeline on top: two stages, each of them sharded and split. Eight ranks:

# %%
mesh.grid({"pp": 2, "dp": 2, "tp": 2})

# %% [markdown]
# Eight ranks are many for a small machine: this takes a while on CPU.

# %% tags=["long"]
axes = {"pp": 2, "dp": 2, "tp": 2}
three = run("pp_fsdp2_tp", workload="gpt", **place(8), steps=4, samples=64, batch_size=4).wait()
print(mib(mesh.by_axis(three, axes)))

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# Along `pp` next to nothing is sent: one activation for each micro-batch, and its gradient back. It is the axis for the slowest wire.
#
# </details>
#
# ## Which axis over which wire
#
# Now the question of the beginning, **modelled**: a model of 7 billion parameters on two machines with eight GPUs. Bytes by the
# formulas above, for one rank and one step, in numbers of 2 bytes. Set the bandwidths of *your* wires, in bytes per second.

# %%
inside, between = 300e9, 25e9  # of one GPU: say NVLink, and a network card of 200 Gbit/s
axes = {"pp": 2, "dp": 2, "tp": 4}

parameters, layers, width, places, batch = 7e9, 32, 4096, 4096, 8
activation = 2 * batch * places * width
sent = {
    "tp": 2 * 3 / 4 * activation * 4 * layers / axes["pp"],  # a stage has half the layers
    "dp": 3 * 1 / 2 * 2 * parameters / (axes["tp"] * axes["pp"]),
    "pp": activation,  # one border: forward on one side of it, backward on the other
}
print({axis: f"{bytes_ / 1e9:.2f} GB" for axis, bytes_ in sent.items()})

# %% [markdown]
# The mesh can be laid over the machines in six orders, the outermost axis first. An axis that leaves a machine uses the slow wire.
# **Predict** the best and the worst.

# %%
mesh.wires(axes, sent, per_node=8, inside=inside, between=between)

# %% [markdown]
# <details class="answer"><summary>The rule that comes out</summary>
#
# `tp` innermost, on the fastest wire: it sends most, and nothing hides it. `pp` outermost: it sends least. `dp` between them. Set
# `between = 300e9`: with one wire everywhere the order does not matter. Set `batch` to 1: which axis is the dearest then?
#
# The model counts bytes over bandwidth. It knows no latency, no overlap and no bubble: it ranks the orders, and does not foretell a
# step's time.
#
# </details>

# %%
mesh.grid(axes, per_node=8)

# %% [markdown]
# ## Exercise: who am I?
#
# Write `place_of(rank, pp, dp, tp)`: it gives the coordinates of a rank on a mesh of `pp × dp × tp`, as a tuple `(pp, dp, tp)`, each
# from 0. The last axis has neighbours, as in `init_device_mesh`.


# %% tags=["exercise"]
def place_of(rank, pp, dp, tp): ...


check("combine.place", place_of)

# %% [markdown]
# ## Exercise: only activations between the machines
#
# Imagine that ranks 0 and 1 are one machine, and ranks 2 and 3 another. Train any workload for 5 steps on four ranks, so that *only
# activations and their gradients* go between the machines, gradients of parameters stay inside of one, and the two ranks of a machine
# have samples of their own.

# %% tags=["exercise"]
two_machines = ...  # run("…", **HERE, steps=5, samples=200).wait()
check("combine.machines", two_machines)

# %% [markdown]
# ## The panel
#
# Free play: under *more* there are all strategies with a mesh. Choose sizes of the axes that do not fit the ranks, and
# read what it says.

# %%
Lab(strategy="fsdp2_tp", workload="mlp", **HERE, steps=10)
