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
# # Long context: one window on several ranks
#
# Every strategy so far splits the batch, the layers or the blocks. But a single window of a million tokens does not fit
# on one GPU: activations grow with its length, and attention relates each position to all earlier ones. **Context
# parallelism** splits the *sequence*. Embedding, norms, MLPs and the loss treat each position on its own, so nothing
# changes for them. **But attention needs the keys and values of all earlier positions: how does a rank get them, and is
# the work the same for everybody?**
#
# This lab takes about 25 minutes. Its cells compute for about 1 minute on two cores.

# %%
from labkit import Lab, Spec, check, excerpt, guess, place, run

HERE = place(4)  # four GPUs if this machine has them, otherwise four CPU ranks
SMALL = {"workload": "gpt", "samples": 64, "batch_size": 4, "steps": 6, "precision": "fp32"}

# %% [markdown]
# ## Who has more to do?
#
# Causal attention of position *t* looks at *t* + 1 keys. Four ranks get a quarter of the window each, in order.
# **Predict:** how many times as much attention does the last rank compute as the first?


# %%
def pairs(positions):
    return sum(position + 1 for position in positions)


quarters = [pairs(range(32 * rank, 32 * rank + 32)) for rank in range(4)]
print(quarters, f"{quarters[-1] / quarters[0]:.1f} times")

# %% [markdown]
# So the window is cut into *2n* chunks, and rank *r* gets the *r*-th from the beginning and the *r*-th from the end
# (Llama 3, 2024, section 3.3.2):

# %%
split = Spec(strategy="cp", **HERE, **SMALL)
excerpt(split, "positions_of", "windows", "positions")

# %%
chunks = [range(16 * number, 16 * number + 16) for number in range(8)]
print([pairs(chunks[rank]) + pairs(chunks[7 - rank]) for rank in range(4)])

# %% [markdown]
# ## All-gather
#
# The simplest way: every rank gathers the keys and values of the whole window, layer by layer, and backward
# reduce-scatters their gradients. A mask compares positions.

# %%
excerpt(split, "attend")

# %% [markdown]
# **Predict** how many MiB one of four ranks sends per step, with 5 layers, 4 windows of 128 positions, and keys and
# values of 128 numbers of 4 bytes. The gradients of the 4.3 MB of parameters are all-reduced as in DDP.

# %%
my_guess = guess("sent_mb", ...)  # MiB per rank and step
gathered = run(split).wait()
my_guess

# %%
gathered.ledger()

# %% [markdown]
# <details class="answer"><summary>What is stored?</summary>
#
# Keys and values of the *whole* window, on every rank, until the backward of their layer. With grouped-query attention
# they are small compared with the queries, which makes this the method of Llama 3.
#
# </details>
#
# ## Ring attention
#
# A rank can also attend to the chunks of one rank after the other. The keys and values travel around a ring (Liu et
# al. 2023): each step sends those that have just been used to the next rank. Softmax can be computed in parts, if the
# sum of the weights of each part is kept.

# %%
ring = Spec(**split.to_json() | {"options": {"method": "ring"}})
excerpt(ring, "part_of_softmax", "through_ring")

# %% [markdown]
# **Predict:** which pairs of chunks does a rank skip because of the causal mask? Are there ranks that skip more than
# others?
#
# <details class="answer"><summary>Answer</summary>
#
# For the chunks of a lower rank, both of its own chunks attend to the first one only; for those of a higher rank, its
# second chunk attends to both. Either way it is half of the pairs, in every step of the ring and on every rank.
#
# </details>

# %%
passed = run(ring).wait()
passed.ledger()

# %% [markdown]
# ## Ulysses
#
# Attention heads are independent of each other. An all-to-all exchanges *all heads at some positions* for *some heads
# at all positions*, and another one reverses it for the output (Jacobs et al. 2023).

# %%
ulysses = Spec(**split.to_json() | {"options": {"method": "ulysses"}})
excerpt(ulysses, "by_heads", "by_positions", "attend")

# %%
exchanged = run(ulysses).wait()
exchanged.ledger()

# %% [markdown]
# All three train the same model: the losses lie on top of each other.

# %%
exchanged.figure("loss")

# %% [markdown]
# | | bytes sent per rank and layer, forward and backward | limit |
# | --- | --- | --- |
# | all-gather | 2(n−1)/n · 2·B·T·d numbers | stores the keys and values of the whole window |
# | ring | 2(n−1)/n · 2·B·T·d numbers | short chunks compute too little to hide the messages |
# | Ulysses | 8(n−1)/n · B·T·d/n numbers | at most as many ranks as heads (of keys and values) |
#
# gloo implements the reduce-scatter of the first method as an all-reduce, which doubles it on CPU ranks.
#
# **Predict:** from how many ranks on does Ulysses send less than a ring? (With two ranks, they are equal.) Why are ring
# and Ulysses often combined: Ulysses within a machine, a ring between machines?
#
# ## Exercise: the chunks of a rank
#
# Write `chunks_of(rank, ranks)`: the numbers of the two chunks of a rank, counted from 0, as a tuple.


# %% tags=["exercise"]
def chunks_of(rank, ranks): ...


check("long_context.chunks", chunks_of)

# %% [markdown]
# ## Exercise: the fewest bytes
#
# Train `gpt` for 4 steps with context parallelism on four ranks, in fp32 and with a batch of 4, with the method that
# sends the fewest bytes for attention.

# %% tags=["exercise"]
fewest = ...  # run("cp", **HERE, **SMALL, options={…}).wait()
check("long_context.bytes", fewest)

# %% [markdown]
# ## The panel
#
# Experiment: a context of 1024 positions, and the memory of a step with each method.

# %%
Lab(strategy="cp", **HERE, **SMALL)
