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
# # Mixture of experts: more parameters, the same work per token
#
# The MLP of a transformer layer multiplies every token by all of its parameters. A **mixture of experts** has several
# MLPs per layer, the *experts*, and a small *router* that sends each token to a few of them. The model has many times
# the parameters, and a token costs about as much as before: Mixtral has 8 experts and uses 2, DeepSeek-V3 has 256 and
# uses 8 (and a shared one). **But where do the experts live, how do the tokens get there, and what if all of them want
# the same expert?**
#
# This lab takes about 25 minutes. Its cells compute for about 1 minute on two cores.

# %%
from labkit import Lab, Spec, check, excerpt, guess, pictures, place, run

HERE = place(2)  # two GPUs if this machine has them, otherwise two CPU ranks
SMALL = {"workload": "moe", "samples": 64, "batch_size": 4, "precision": "fp32"}

# %% [markdown]
# ## The router
#
# The router is a linear layer: a softmax over all experts gives each token a probability per expert. The token goes to
# the `TOP_K` best, and their outputs are added, weighted by these probabilities (Fedus et al. 2021, section 2.1, with
# one expert per token). Shazeer et al. (2017), and later Mixtral, take the softmax over the chosen experts only.

# %%
alone = Spec(strategy="single", nproc=1, device=HERE["device"], steps=24, **SMALL)
excerpt(alone, "Mixture")

# %% [markdown]
# Tensors have fixed shapes, but nobody knows in advance how many tokens an expert gets. So each expert has a fixed
# number of **slots** for each sequence of *T* positions, the *capacity* (Lepikhin et al. 2020):
#
# $$C = \lceil f \cdot k \cdot T / E \rceil$$
#
# for *E* experts, *k* of them per token, and a capacity factor *f*. A token that finds no free slot is **dropped**:
# it keeps the residual connection only. Slots that stay empty are computed, too.
#
# **Predict:** *T* = 128, *E* = 8, *k* = 2, *f* = 1.25. How many slots does an expert have? If one expert is
# everybody's first choice, how many of the 128 first choices are dropped?
#
# <details class="answer"><summary>Answer</summary>
#
# C = 1.25 · 2 · 128 / 8 = 40 slots: 88 of the 128 first choices are dropped.
#
# </details>
#
# ## Load balance
#
# An expert that is chosen more often is trained more, becomes better, and is chosen even more often. A second loss
# works against this: *E* · Σ (share of the choices) · (mean probability) of each expert, which is 1 if the load is
# even. The script adds it for every layer, with the weight `BALANCE`.

# %%
excerpt(alone, "loss_of", "report")

# %% [markdown]
# **Predict:** after 24 steps *without* this loss, by what factor is the busiest expert chosen more often than the mean?

# %%
unbalanced = run(Spec(**alone.to_json() | {"options": {"balance": 0.0}})).wait()
unbalanced.figure("experts")

# %% [markdown]
# And with a weight of 0.05:

# %%
balanced = run(Spec(**alone.to_json() | {"options": {"balance": 0.05}})).wait()
balanced.figure("experts")

# %% [markdown]
# From 20 steps on, the lab reports an expert that is chosen at least twice as often as the mean:

# %%
unbalanced.findings()

# %% [markdown]
# ## Since then
#
# **No slots.** Fixed slots are computed when they are empty and drop tokens when they are full. MegaBlocks (Gale et al.
# 2022) sorts the tokens by expert and multiplies groups of different lengths in one kernel; torch has it as
# `torch.nn.functional.grouped_mm`. Nothing is padded and no token dropped, but the ranks must first tell each other how
# many tokens come. Most models are trained this way now. This lab keeps slots because their bytes can be counted before
# the run.
#
# **No second loss.** DeepSeek-V3 (2024, section 2.1.2) adds a bias to each expert's score, for the choice alone and not
# for the weight of its output. After every step, the bias of a busy expert goes down a little and that of an idle one
# goes up. Nothing pulls on the gradients of the model.
#
# **The experts choose.** If each expert takes the C tokens with its highest scores (Zhou et al. 2022), the load is even
# by construction, but some tokens are taken by nobody. **Predict** why this does not suit a model that writes text.
#
# <details class="answer"><summary>Answer</summary>
#
# Whether an expert takes a token depends on all tokens of the sequence, also on later ones. While the model writes,
# there are none yet: it would meet choices that it was not trained for. Where each token chooses its experts, the
# choice depends on this token alone.
#
# </details>
#
# ## Expert parallelism
#
# Each rank holds *E / n* experts of every layer, and everything else as in DDP. Each rank has its own samples, so every
# layer sends tokens twice, by an **all-to-all**: *dispatch* and *combine*. Here are two ranks with a sequence of six
# tokens each, four experts, and one expert per token. **Predict** what changes if nothing is dropped: which rank
# computes more, and does rank 0 send more or less?

# %%
pictures.expert_parallel.dispatch(factor=1.0)

# %%
pictures.expert_parallel.dispatch(factor=None)

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# With slots, every rank sends and computes the same, whatever the router chooses: some tokens are dropped, and some
# slots are empty. Without them, only tokens are sent, so rank 0 sends less. But everybody's favourite expert is on
# rank 0, which computes twice as much as rank 1, and rank 1 waits for it. That is why the load must be balanced.
#
# </details>
#
# In the script:

# %%
split = Spec(strategy="ep", **HERE, steps=4, **SMALL)
excerpt(split, "AllToAll", "apply_experts", "keep_own_experts")

# %% [markdown]
# **Predict** how many MiB one rank sends per step. There are 5 layers, a batch of 4 sequences per rank, 8 · 40 slots
# per sequence, and 128 numbers of 4 bytes in each; backward sends the gradients of both. Half of the slots belong to
# the rank itself. The 3.4 MB of other gradients are all-reduced.

# %%
my_guess = guess("sent_mb", ...)  # MiB per rank and step
job = run(split).wait()
my_guess

# %%
job.ledger()

# %% [markdown]
# <details class="answer"><summary>What does a larger batch change, and what do more experts change?</summary>
#
# The tokens grow with the batch, unlike the gradients of DDP. With more experts, each has fewer slots: *E · C* stays
# the same, and so do the bytes. They grow with *k* and with the capacity factor.
#
# </details>
#
# The gradient of an expert comes from the tokens of *all* ranks, so nothing is all-reduced; it is divided by *n*
# because the loss is a mean over the ranks. Capacity and balance loss are those of one sequence, wherever it is
# computed: therefore the losses are those of one process.

# %% [markdown]
# ## The rest, sharded
#
# Experts are most of the parameters. What remains is whole on every rank, or sharded by FSDP2 (`dense=sharded`).
# **Predict:** by how much does this reduce the model states of a rank, if 15 % of all parameters are not experts?

# %%
sharded = run(Spec(**split.to_json() | {"options": {"dense": "sharded"}})).wait()
for one in (job, sharded):
    owned = one.summary()["ranks"][0]["memory_bytes"]
    print(f"{one.name}: {sum(owned[name] for name in ('parameters', 'gradients', 'optimizer')) / 2**20:.1f} MiB")

# %% [markdown]
# ## Exercise: what a layer sends
#
# How many MB (10⁶ bytes) does a rank send to the other ranks in the *forward* of one layer? The layer is drawn for you:
# run the cell with the three dots, and the verdict says what it is.

# %% tags=["exercise"]
megabytes = ...
check("mixture_of_experts.slots", megabytes)

# %% [markdown]
# ## Exercise: experts for given bytes
#
# Train `moe` for 4 steps with expert parallelism on two ranks, in fp32 and with a batch of 4 per rank. The number of
# experts, *k*, and the bytes that tokens need are drawn for you, in the verdict on three dots. Which option is left,
# and what must it be?

# %% tags=["exercise"]
mine = ...  # run("ep", **HERE, steps=4, **SMALL, options={…}).wait()
check("mixture_of_experts.bytes", mine)

# %% [markdown]
# ## The panel
#
# Experiment: set `capacity_factor` to 0.5 and compare the loss; choose a number of ranks that does not divide the
# number of experts, and read the error message.

# %%
Lab(strategy="ep", **HERE, steps=4, **SMALL)
