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
# # Capstone: compose a trainer on a mesh, then lay out a 13B model and defend it
#
# **You have built DDP, ZeRO, tensor parallelism and a pipeline, each on its own. What changes if a rank belongs to
# three groups at once: who sends what to whom, and over which group is which gradient summed? And then: your group gets
# two nodes of eight A100 with 40 GB each, and a model with 13 billion parameters. Which layout do you propose, and what
# do you answer when somebody asks "why not simply FSDP?"**
#
# In the first half you compose the parts of labs [13](13_build_ddp_and_zero.py) and [14](14_build_model_parallel.py)
# into a trainer for a small GPT on eight CPU ranks, which takes one to two hours. In the second half, of half an hour,
# you choose a layout by paper and by model, defend the choice with figures, and try its twin, a model with ten million
# parameters, on four real ranks. The cells compute for about 1 minute on two cores, and the check of the trainer takes
# about half a minute.

# %%
from labkit import Spec, advise, atlas, check, guess, pictures, place, predict, run, starter

MESH = {"data": 2, "pipeline": 2, "tensor": 2}
CASE = {"params": "13B", "devices": 16, "machine": "a100x8", "memory": "40GB"}
HERE = place(4)  # four GPUs if this machine has them, otherwise four CPU ranks

# %% [markdown]
# ## Three groups for each rank
#
# Eight ranks form a mesh. Tensor ranks are neighbours, because they send most; the two replicas are farthest apart.
# Ranks with the same colour in the picture form a group.
#
# **Predict** before you look: with which rank does rank 5 sum the gradients of its samples? To which one does it send
# activations, and with which does it share a layer?

# %%
pictures.mesh.grid(MESH)

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# 5 = 1 · 4 + 0 · 2 + 1: replica 1, first stage, tensor rank 1. Its data group is 1 and 5, its pipeline group 5 and 7,
# its tensor group 4 and 5. Every rank is in three groups of two, and there are twelve groups: each is created by *all*
# ranks with `dist.new_group`, in the same order, or the call hangs.
#
# </details>
#
# ## The parts
#
# This cell writes the script `mesh_training.py` next to this notebook. Read it once from top to bottom. The parts work,
# and each gets its group: attention and MLP by columns and rows with sequence parallelism, a vocabulary that is split
# over the tensor group, the parallel cross-entropy, 1F1B, and ZeRO-1. `OneDevice` trains the whole GPT. The class
# `Training`, which composes the parts on the mesh, has three dots where your code goes.

# %%
script = starter("capstone.trainer")
print(script, "is next to this notebook:", len(script.read_text().splitlines()), "lines")

# %% [markdown]
# ## Bytes by formula
#
# What will a rank store and send? Count it before you write the trainer. For a rank of the *first* stage, only for the
# blocks, and all of it in fp32:
#
# - *stored* between two steps: its parameters, and its shard of the two moments of Adam. Gradients are freed
# - *data*: once per step a reduce-scatter of the gradients and an all-gather of the parameters, over the data ranks
# - *pipeline*: of each micro-batch the positions that this rank has
# - *tensor*: of each micro-batch and block, four all-gathers and four reduce-scatters of all positions. Why eight?
#
# Rings, as always: an all-gather or a reduce-scatter of B bytes over n ranks sends (n − 1) / n · B per rank.
#
# **Exercise 1.** Write it as a function that returns these four numbers of bytes. `numbers` is positions × samples ×
# width of one micro-batch; `data`, `pipeline` and `tensor` are the ranks along each axis.


# %% tags=["exercise"]
def per_rank(parameters, numbers, micro_batches, blocks, data, pipeline, tensor): ...


check("capstone.bytes", per_rank)

# %% [markdown]
# Now use it for the GPT of the script. Along which axis does a rank send most? Which axis would you place on the
# slowest link? Which of the four numbers grow with the batch, and which do not?
#
# ## The trainer
#
# On one device, the script prints the losses that the mesh must have as well, up to rounding. The cell runs on one
# rank; with `ranks = 8` it runs your class `Training`.

# %%
ranks = 1  # 8, when Training is written
my_guess = guess("sent_mb", ...)  # MiB that a rank sends per step
job = run(script, nproc=ranks, device="cpu").wait()
print(job.logs(rank=0))

# %% [markdown]
# **Predict**, then write. Which line of your code holds each answer?
#
# 1. Which parameters does the first stage have, which the last, and which one do both have?
# 2. Each loss is a mean over the samples of a micro-batch, and gradients add up: over micro-batches, over stages, over
#    tensor ranks, over replicas. Which of these sums must become a mean? By which number is a loss divided?
# 3. Two tensor ranks have the same LayerNorm, and each has seen its own positions. Are their gradients equal? And those
#    of the biases `out.bias` and `down.bias`? Of the split `up.bias`?
# 4. The vocabulary is used for the lookup and for the logits. Who has the gradient of which use?
# 5. In which order do these sums and ZeRO-1 happen? What would be wrong the other way round?
# 6. Only the last stage knows a loss. How does it reach all ranks?
#
# <details class="answer"><summary>Hint</summary>
#
# Sums come before the update: over the tensor group the gradients of what is replicated in it, over the pipeline group
# those of what two stages share, and over the data group all of them, which ZeRO-1 does. Nothing is divided by the
# number of tensor or pipeline ranks: they compute parts of the same gradient. Only replicas have different samples.
#
# </details>
#
# **Exercise 2.** Write `Training` in `mesh_training.py`. The check runs it on eight ranks with parameters and samples
# that it draws. A rank gets the samples of its replica only, and of these the tokens in the first stage and the targets
# in the last one. It measures:
#
# - the losses of one device in each step, on every rank; and each rank's parameters after the first and the last step
# - bytes sent along each axis: what you counted above, and for the vocabulary and the loss a little more. A call
#   belongs to the axis along which the ranks of its group differ
# - bytes stored: a rank's parts of its stage, and the moments of its shard
# - operations: a rank's parts of the products
# - no finished implementation. `init_device_mesh` is allowed: it makes groups and nothing else

# %% tags=["exercise"]
answer = ...  # "mesh_training.py", when Training is written
check("capstone.trainer", answer)

# %% [markdown]
# When it is right, set `ranks = 8` above, guess the MiB that a rank sends per step with your function, and run the cell
# again. Then compare what the probe has measured with the four numbers.

# %%
my_guess

# %%
pictures.mesh.by_axis(job, {"data": 2, "pp": 2, "tensor": 2})  # bytes of rank 0 in one step

# %%
job.figure("memory_by_owner")

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# The judge counts a reduce-scatter as a ring sends it. The run shows what gloo does, which implements a reduce-scatter
# as an all-reduce, with twice the bytes. Half of what is sent along the tensor axis are reduce-scatters, and half of
# what ZeRO-1 sends: the run shows one and a half times your number along these two axes.
#
# Along the tensor axis a rank sends twice as much here as along the data axis, and every block waits for it. This is
# why tensor parallelism stays within a node. The data axis sends as much as the parameters are large, however many
# micro-batches there are; the pipeline sends least. A loss on eight ranks differs from that of one device in the last
# digits, because sums are added in another order.
#
# A scale that is wrong by a constant factor hides well: Adam divides by the size of the gradients, so that a factor of
# three hardly shows in the losses. It still changes what weight decay and gradient clipping do. Compare the parameters
# with those of one device, as the check does.
#
# </details>
#
# # A layout for 13B
#
# The trainer works for two ranks along each axis. From here on the question is how many there should be.

# %% [markdown]
# ## On paper
#
# Answer these before you run anything. You need 16 bytes per parameter, and lab 08's rule about links.
#
# 1. How many GB are the states, in total and on each of 16 devices if everything is sharded?
# 2. How many GB are left on a device for activations?
# 3. Which axes may cross the link between the nodes?
#
# <details class="answer"><summary>Answer</summary>
#
# 1. 208 GB, 13 GB on each device.
# 2. 40 − 13 = 27 GB, minus a reserve of about a tenth of the memory for the CUDA context, NCCL and fragmentation: 23
#    GB.
# 3. Those whose traffic is small (PP) or overlaps with computation (FSDP, DDP). TP stays within a node.
#
# </details>
#
# ## By model
#
# All figures of the next cell are modelled. Which layouts need no recomputation, and what does that gain?

# %%
proposals = advise(**CASE)
proposals

# %% [markdown]
# <details class="answer"><summary>Why not simply FSDP over 16?</summary>
#
# It fits only with recomputation, because a single sample of 4,096 tokens leaves more activations than there is room
# for. The table recomputes every layer or none, and every layer adds about a third to the computation of a step. In
# practice one would recompute only as many as must be: about 18 of the 40 layers, or the attention of each layer alone
# (Korthikanti et al. 2022), which adds half of that or less. Splitting the activations instead, along the sequence (CP)
# or along the layers' width (TP), costs some exposed communication: compare it with that smaller price.
#
# </details>
#
# How robust is the answer? Suppose the GPUs have 80 GB, or the batch is a quarter. Predict which layout is the fastest
# then.

# %%
for change in ({"memory": "80GB"}, {"batch": 128}, {"sequence": 2048}):
    first = advise(**CASE | change).to_json()["fits"][0]
    print(f"{change}: {first['title']}, recompute: {first['recompute']}, {first['seconds_per_step']:.0f} s per step")

# %% [markdown]
# And if the group gets more nodes? The line of a good layout should stay flat.

# %%
proposals.scaling().figure()

# %% [markdown]
# ## The proposal
#
# **Exercise 3.** Choose a layout that fits without recomputation and that is at most 3 % slower than the fastest, for
# *your* cluster: run the cell with the three dots, and the verdict says how many devices it has, and how long your
# sequences are. Decide on paper first which axes you need and how large they must be, then compare with `advise`.
# Answer with the name of a layout, such as `"FSDP 16"`.

# %% tags=["exercise"]
proposal = ...
check("capstone.layout", proposal)

# %% [markdown]
# ## The twin
#
# You will not get 16 A100 for a trial. But the *structure* of a layout, which collectives run along which axis and what
# each rank stores, can be tried with a small model: a GPT with ten million parameters on four ranks, 2 × 2 instead of
# 8 × 2. Its peak memory and traffic are predicted by tracing the script, before it runs.

# %%
SMALL = {"workload": "gpt", **HERE, "batch_size": 1, "steps": 5, "samples": 20, "options": {"size": "10M"}}
twin = Spec("fsdp2_tp", **SMALL)
predict(twin)

# %% [markdown]
# Before the run, decide: is the prediction of the *memory* a test of the layout on A100s? Of the *time*?

# %%
job = run(twin).wait()
job.figure("memory_by_owner")

# %% [markdown]
# <details class="answer"><summary>What the twin shows, and what it does not</summary>
#
# It shows that the script runs, that each rank stores the shards you expect, and which collectives it calls on which
# group. These follow from the code, and they scale by formula. It shows nothing about time: four CPU ranks share cores
# and have no NVLink, and a matrix of ten million parameters is too small to keep a GPU busy.
#
# </details>
#
# **Exercise 4.** Run the twin of *your* proposal on four ranks for at least five steps: the same kinds of parallelism,
# two ranks along each. (`fsdp2_tp` is FSDP × TP. Of three axes, try two that the lab has a strategy for.)

# %% tags=["exercise"]
trial = ...
check("capstone.twin", trial)

# %% [markdown]
# ## A proposal that real GPUs have judged
#
# Nobody published runs of your 13B model on 16 A100. For the next case somebody did, with many layouts:

# %%
print(atlas(model="nanotron Llama 80B", gpus=128).question)

# %% [markdown]
# The states take 18 bytes per parameter there, because gradients are accumulated in 32 bits; activations are not
# recomputed; ZeRO is 0 or 1. On paper: by how much must TP × PP divide the model? Which of the two may cross the nodes?
#
# **Exercise 5.** Propose a layout, such as `"dp=8,tp=4,pp=4,zero=1,micro_batch=1"`. It is right if it reached 85 % of
# the fastest.

# %% tags=["exercise"]
layout = ...
check("capstone.published", layout)

# %% [markdown]
# When you have answered: all layouts that were tried, coloured by the number of stages.

# %%
pictures.atlas(model="nanotron Llama 80B", gpus=128, by="pp")

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# Most layouts failed: all that ran divide the model by at least 16, with small micro-batches. Of those, the fast ones
# have TP within a node and a long pipeline. TP over two nodes also fits, and its all-gathers cross the slow links in
# every layer. Compare the spread with the difference between the layouts in the table of `advise` above: the choice
# matters more on 128 GPUs than on 16.
#
# </details>

# %% [markdown]
# ## Defend it
#
# Write down three sentences, as you would say them to the group: what limits the layout (memory, link, or batch), which
# change of the case would make you choose another one, and which figure you would measure in the first hour on the real
# nodes. There is no check for this one.
