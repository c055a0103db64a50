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
# # Combine: meshes, and which axis uses which interconnect
#
# Data parallelism, sharding, tensor parallelism, pipeline parallelism: large models are trained with several of them at
# once. The ranks form a **mesh**, and each kind of parallelism has its own **axis**. **You have two machines with eight
# GPUs each, a fast interconnect within each machine and a slow one between them. Which axis should use which
# interconnect?** The cells of this lab compute for about 1 minute on two cores.

# %%
from labkit import Lab, Spec, check, excerpt, guess, pictures, place, run

HERE = place(4)  # four GPUs if this machine has them, otherwise four CPU ranks
mesh = pictures.mesh

# %% [markdown]
# ## Ranks on a grid
#
# There are four ranks and two axes: `tp` splits layers between neighbouring ranks, `dp` splits the batch. The picture
# shows the ranks once per axis. Ranks with the same letter and colour form a group: along *that* axis, a rank
# communicates only within its group.

# %%
mesh.grid({"dp": 2, "tp": 2})

# %% [markdown]
# In the script this is one call. Neighbouring ranks differ in the *last* axis: ranks 0 and 1 differ in `tp`.

# %%
both = Spec(strategy="fsdp2_tp", workload="gpt", **HERE, steps=10, samples=80, batch_size=4)
excerpt(both, "mesh", "parallelize")

# %% [markdown]
# **Predict:** which of these four ranks have the same samples? Which have the same shard of a layer?
#
# <details class="answer"><summary>Answer</summary>
#
# The same samples: the ranks of a `tp` group, 0 and 1, 2 and 3. The same shard of a layer: the ranks of a `dp` group, 0
# and 2, 1 and 3; FSDP2 shards it further between them.
#
# </details>
#
# ## HSDP: replicas of shards
#
# With FSDP on many machines, every all-gather of a block crosses the slow interconnect. *Hybrid* sharding (HSDP) shards
# only within a machine and replicates across machines. Between machines, only gradients are averaged, and each rank
# sends only its shard of them. Here are two machines with four GPUs each:

# %%
mesh.grid({"replicate": 2, "shard": 4}, per_node=4)

# %% [markdown]
# **Predict** for *r* replicas of *s* shards and *P* parameters of 4 bytes: how many bytes does one rank send per step
# along each axis, with FSDP over all ranks and with HSDP? On a mesh of 2 × 2, is it less than with FSDP on 4 ranks? The
# cell has the traffic of the latter.

# %%
P = Spec(strategy="fsdp2", workload="gpt", nproc=4).workload_row.parameters({"size": "1M", "context": 128})
print(f"FSDP on 4 ranks: {3 * 3 / 4 * 4 * P / 2**20:.2f} MiB per rank and step")
my_guess = guess("sent_mb", ...)  # HSDP on 2 × 2 ranks: MiB per rank and step

# %% [markdown]
# Now run it on four ranks. `by_axis` sums what rank 0 sent in the profiled step, by group.

# %%
hybrid = Spec(
    strategy="fsdp2",
    workload="gpt",
    **HERE,
    steps=10,
    samples=160,
    batch_size=4,
    precision="fp32",
    options={"replicas": 2},
)
job = run(hybrid).wait()
my_guess

# %% [markdown]
# By formula and measured, by axis:


# %%
def hsdp(r, s):
    shard = 3 * (s - 1) / s * 4 * P  # all-gather, all-gather, reduce-scatter
    replicate = 2 * (r - 1) / r * 4 * P / s  # all-reduce of a shard
    return {"replicate": replicate, "shard": shard}


def mib(sent):
    return "  ".join(f"{axis} {bytes_ / 2**20:.2f} MiB" for axis, bytes_ in sent.items())


print("FSDP, 1 × 4:", mib(hsdp(1, 4)))
print("HSDP, 2 × 2:", mib(hsdp(2, 2)))
print("measured:   ", mib(mesh.by_axis(job, {"replicate": 2, "shard": 2})))

# %% [markdown]
# <details class="answer"><summary>Does the measurement agree with the formula?</summary>
#
# NCCL has a native reduce-scatter, so on GPUs it should (no run on GPUs is recorded here). gloo, the backend of CPU
# ranks, implements a reduce-scatter as an all-reduce: it sends twice as much for one of the three collectives along
# `shard`, so the total is 4 units instead of 3. `job.ledger()` shows the same for all ranks, with the reasons.
#
# </details>
#
# ## FSDP with tensor parallelism
#
# **Predict:** on the 2 × 2 mesh, which axis has more traffic per step: activations along `tp`, or parameters and
# gradients along `dp`? The GPT has 5 layers of width 128, and a rank processes 4 sequences of 128 positions.

# %%
layers, width, positions, batch, vocabulary = 5, 128, 128, 4, 256
activation = 4 * batch * positions * width
logits = (2 - 1) / 2 * 4 * batch * positions * vocabulary
tp = 2 * (2 - 1) / 2 * activation * (4 * layers + 1) + logits  # see lab 06
dp = 3 * (2 - 1) / 2 * 4 * P / 2  # as FSDP, with half of the parameters
print(mib({"dp": dp, "tp": tp}))

# %%
my_guess = guess("sent_mb", ...)  # MiB per rank and step: the sum of the formulas, or your own prediction
split = run(both).wait()
print(mib(mesh.by_axis(split, {"dp": 2, "tp": 2})))
my_guess

# %% [markdown]
# Was it more than predicted? The ledger gives a reason and a number for each difference. Its figures are sums over all
# four ranks.

# %%
split.ledger()

# %% [markdown]
# Traffic is not the only criterion. Communication along `dp` can overlap with computation on a device that computes
# while it sends: the next block is gathered while the current one computes. Communication along `tp` is exposed in this
# script: the next matrix product waits for it. [Lab 06](06_tensor_parallel.py) says what others overlap it with.

# %%
split.figure("timeline")

# %% [markdown]
# ## Three axes
#
# Add a pipeline: two stages, each of them sharded and split. That takes eight ranks:

# %%
mesh.grid({"pp": 2, "dp": 2, "tp": 2})

# %% [markdown]
# Eight ranks are a lot for a small machine: this takes a while on CPU.

# %% tags=["long"]
axes = {"pp": 2, "dp": 2, "tp": 2}
three = run("pp_fsdp2_tp", workload="gpt", **place(8), steps=4, samples=32, batch_size=4).wait()
print(mib(mesh.by_axis(three, axes)))

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# There is almost no traffic along `pp`: one activation per micro-batch, and its gradient back. This axis suits the
# slowest interconnect.
#
# </details>
#
# ## Which axis uses which interconnect
#
# Back to the question from the beginning, as a **model**: 7 billion parameters on two machines with eight GPUs each.
# The bytes are those of the formulas above, for one rank and one step, in numbers of 2 bytes. Set the bandwidths of
# *your* interconnects, in bytes per second.

# %%
inside, between = 300e9, 25e9  # per GPU: for example NVLink, and a 200 Gbit/s network card
axes = {"pp": 2, "dp": 2, "tp": 4}

parameters, layers, width, positions, batch = 7e9, 32, 4096, 4096, 8
activation = 2 * batch * positions * width
sent = {
    "tp": 2 * 3 / 4 * activation * 4 * layers / axes["pp"],  # a stage has half of the layers
    "dp": 2 * 1 / 2 * 2 * parameters / (axes["tp"] * axes["pp"]),  # one all-gather, kept; one reduce-scatter
    "pp": activation,  # one boundary: forward in one direction, backward in the other
}
print({axis: f"{bytes_ / 1e9:.2f} GB" for axis, bytes_ in sent.items()})

# %% [markdown]
# There are six ways to order the axes, from the outermost to the innermost. An axis that spans both machines uses the
# slow interconnect. **Predict** the best and the worst order.

# %%
mesh.wires(axes, sent, per_node=8, inside=inside, between=between)

# %% [markdown]
# <details class="answer"><summary>The resulting rule</summary>
#
# `tp` innermost, on the fastest interconnect: it sends the most, and in these scripts nothing overlaps with it (lab 06
# says who overlaps it, and how). `pp` outermost: it sends the least. `dp` in between. That is one convention. Llama 3
# puts FSDP outermost instead (Dubey et al. 2024, section 3.3.2): its all-gathers can be prefetched and overlap with
# computation, whereas a stage of a pipeline waits for every message. Set `between = 300e9`: with one bandwidth
# everywhere, the order does not matter. Set `batch` to 1: which axis is the most expensive then?
#
# The model divides bytes by bandwidth. It ignores latency, overlap and bubbles: it ranks the orders and does not
# predict the step time.
#
# </details>

# %%
mesh.grid(axes, per_node=8)

# %% [markdown]
# ## Exercise: the coordinates of a rank
#
# Write `place_of(rank, pp, dp, tp)`. It returns the coordinates of a rank on a mesh of `pp × dp × tp`, as a tuple `(pp,
# dp, tp)`, each counted from 0. Neighbouring ranks differ in the last axis, as with `init_device_mesh`.


# %% tags=["exercise"]
def place_of(rank, pp, dp, tp): ...


check("combine.place", place_of)

# %% [markdown]
# ## Exercise: only activations between the machines
#
# Assume that ranks 0 and 1 are on one machine, and ranks 2 and 3 on another. Train any workload for 5 steps on four
# ranks, so that *only activations and their gradients* are sent between the machines, gradients of parameters stay
# within a machine, and the two ranks of a machine have different samples.

# %% tags=["exercise"]
two_machines = ...  # run("…", **HERE, steps=5, samples=80).wait()
check("combine.machines", two_machines)

# %% [markdown]
# ## The panel
#
# Experiment: *more* lists all strategies with a mesh. Choose axis sizes that do not match the number of ranks, and read
# the error message.

# %%
Lab(strategy="fsdp2_tp", workload="mlp", **HERE, steps=10)
