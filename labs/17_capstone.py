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
# # Capstone: lay out a 13B model on two nodes, and defend it
#
# **Your group gets two nodes of eight A100 with 40 GB each, and a model with 13 billion parameters. Which layout do you
# propose, and what do you answer when somebody asks "why not simply FSDP?"**
#
# You choose by paper and by model, defend the choice with figures, and then try the twin of your layout, a model with
# ten million parameters, on four real ranks. The lab takes half an hour. Its cells compute for about 1 minute on two
# cores.

# %%
from labkit import Spec, advise, atlas, check, pictures, place, predict, run

CASE = {"params": "13B", "devices": 16, "machine": "a100x8", "memory": "40GB"}
HERE = place(4)  # four GPUs if this machine has them, otherwise four CPU ranks

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
# **Exercise 1.** Choose a layout that fits without recomputation and that is at most 5 % slower than the fastest.
# Answer with its name as in the table, such as `"FSDP 16"`.

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
# **Exercise 2.** Run the twin of *your* proposal on four ranks for at least five steps: the same kinds of parallelism,
# two ranks along each. (`fsdp2_tp` is FSDP × TP. Choose a proposal of two axes that the lab has a strategy for.)

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
# **Exercise 3.** Propose a layout, such as `"dp=8,tp=4,pp=4,zero=1,micro_batch=1"`. It is right if it reached 85 % of
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
