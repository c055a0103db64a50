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
# # Long context: one sequence on several ranks
#
# Every strategy so far splits the batch, the layers or the blocks. But a single sequence of a million tokens does not
# fit on one GPU: activations grow with its length, and attention relates each position to all earlier ones. **Context
# parallelism** splits the *sequence*. Embedding, norms, MLPs and the loss treat each position on its own, so nothing
# changes for them. **But attention needs the keys and values of all earlier positions: how does a rank get them, and is
# the work the same for everybody?**
#
# This lab takes about 25 minutes. Its cells compute for about 1 minute on two cores.

# %%
from labkit import Lab, Spec, check, excerpt, guess, pictures, place, predict, run

HERE = place(4)  # four GPUs if this machine has them, otherwise four CPU ranks
SMALL = {"workload": "gpt", "samples": 64, "batch_size": 4, "steps": 6, "precision": "fp32"}

# %% [markdown]
# ## Who has more to do?
#
# Causal attention of position *t* looks at *t* + 1 keys. Four ranks get a quarter of the sequence each, in order.
# **Predict:** by what factor does the last rank compute more attention than the first?


# %%
def pairs(positions):
    return sum(position + 1 for position in positions)


quarters = [pairs(range(32 * rank, 32 * rank + 32)) for rank in range(4)]
print(quarters, f"{quarters[-1] / quarters[0]:.1f} times")

# %% [markdown]
# So the sequence is cut into *2n* chunks, and rank *r* gets the *r*-th from the beginning and the *r*-th from the end
# (Llama 3, 2024, section 3.3.2):

# %%
split = Spec(strategy="cp", **HERE, **SMALL)
excerpt(split, "positions_of", "sequences", "positions")

# %%
chunks = [range(16 * number, 16 * number + 16) for number in range(8)]
print([pairs(chunks[rank]) + pairs(chunks[7 - rank]) for rank in range(4)])

# %% [markdown]
# ## All-gather
#
# The simplest way: every rank gathers the keys and values of the whole sequence, layer by layer, and backward
# reduce-scatters their gradients. A mask compares positions.

# %%
excerpt(split, "attend")

# %% [markdown]
# **Predict** how many MiB one of four ranks sends per step, with 5 layers, 4 sequences of 128 positions, and keys and
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
# Keys and values of the *whole* sequence, on every rank, until the backward of their layer. With grouped-query
# attention they are small compared with the queries, which makes this the method of Llama 3.
#
# </details>
#
# ## Ring attention
#
# A rank can also attend to the chunks of one rank after the other, while they travel around a ring (Liu et al. 2023).
# It receives the next ones during its computation with the present ones, and keeps none of them: so the sequence can be
# as long as all ranks together have memory for. Softmax is over all keys, but it can be computed in parts, if the
# logarithm of the sum of the exponentials is carried along.

# %%
ring = Spec(**split.to_json() | {"options": {"method": "ring"}})
excerpt(ring, "visitors", "seen", "RingAttention")

# %% [markdown]
# What forward does not keep, backward must get again: keys and values go around a second time, and the sums of their
# gradients travel behind them, until the last hop brings them home.
#
# **Predict:** the ranks meet after every turn, to pass on keys and values. With the sequence in order, by what factor
# does all of it take longer than with the two chunks of each rank from above?

# %%
pictures.context_parallel.ring(ranks=4)

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# Rows are chunks of queries, columns chunks of keys. In order, a rank skips the keys of all higher ranks and idles
# while the others compute: 14 to 8. In zigzag order it skips half of the pairs, in every turn and on every rank: of a
# lower rank's keys it needs the first chunk only, and of a higher rank's both, but for its second chunk of queries
# only.
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
# | | numbers sent per rank and layer, forward and backward | what it asks for |
# | --- | --- | --- |
# | all-gather | (4 − 4/n) · B·T·d | memory for the keys and values of the whole sequence |
# | ring | (6 − 4/n) · B·T·d | chunks that compute for longer than they travel |
# | Ulysses | (8 − 8/n) · B·T·d / n | as many heads (of keys and values) as ranks, or more |
#
# The ring's keys and values make *n* − 1 hops in forward and as many in backward, and their gradients *n*: after the
# last one they are home. An implementation that lets keys and values go home as well sends (6 − 2/n) · B·T·d.
#
# gloo implements the reduce-scatter of the first method as an all-reduce, which doubles it on CPU ranks.
#
# The ring sends the most and stores the least. **Predict:** with sequences of 512 positions, how many MiB of
# activations does each method need at the peak of a step?

# %%
for method in ("all_gather", "ring", "ulysses"):
    plan = predict("cp", **HERE, **SMALL, options={"method": method, "context": 512}).to_json()
    held = plan["ranks"][0]["at_peak"]["activations"]
    print(f"{method:10} {held / 2**20:5.1f} MiB of activations on a rank, by a trace of the script")

# %% [markdown]
# When is the ring hidden behind the computation? A chunk of *c* positions is 4·*d*·*c* bytes of keys and values in
# bf16, and a rank computes 4·*d*·*c*² operations with it, half of them if a mask hides half. So the transfer is hidden
# if *c* exceeds the operations that a device computes per byte that its link sends (Liu et al. 2023, section 3). An
# H100 computes 989 TFLOP/s and sends 450 GB/s over NVLink: about 2,200 positions, and 4,400 with the causal mask. Over
# InfiniBand at 50 GB/s they are nine times as many.
#
# **Predict:** from which number of ranks does Ulysses send less than all-gather? Why do people combine the two, Ulysses
# within a machine and a ring between machines?
#
# <details class="answer"><summary>Answer</summary>
#
# From three ranks: with two, both send 2·B·T·d numbers. Ulysses sends the least, but it cannot hide what it sends,
# because attention needs all of it before it begins; and it ends at the number of heads. So it belongs where links are
# fast: within a machine. A ring has no limit of ranks, talks to two neighbours only, and hides its transfers if the
# chunks are long, which they are when each of its members is a whole machine. USP (Fang and Zhao 2024) and LoongTrain
# (Gu et al. 2024) train this way.
#
# </details>
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
