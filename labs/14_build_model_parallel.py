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
# # Build it yourself: tensor, pipeline and sequence parallelism
#
# **Which bytes must cross between ranks if they split one layer, the layers, or the sequence? Can you write a version
# that sends no byte more?**
#
# As in [lab 13](13_build_ddp_and_zero.py), `check` runs your code on real CPU ranks and grades what they did: results
# as on a single device, bytes sent, operations per rank, neighbours, the order of a schedule, memory, and no call of a
# finished implementation. Whatever fails is named with its rank and step.
#
# The cells of this lab compute for about 1 minute on two cores, and each check for 5 to 15 seconds.

# %%
import torch
import torch.distributed as dist
from torch import nn

from labkit import check, pictures, place, run

print(torch.__version__)
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

# %% [markdown]
# ## 1. Tensor parallelism: an MLP by columns and rows
#
# An MLP is `relu(x @ w1.T + b1) @ w2.T + b2`. Split over n ranks, each rank has some of the hidden features: rows of
# `w1` (a *column-parallel* layer, because the columns of `w1.T` are split) and the same columns of `w2`
# (*row-parallel*). See [lab 06](06_tensor_parallel.py).
#
# **Predict:** how many all-reduces does a step need, and of which tensors? What happens to `b2` if every rank adds it?
#
# <details class="answer"><summary>Hint</summary>
#
# In forward one, of the partial sums behind the second product. In backward one, of the gradient of `x`: every rank
# has used `x` for other features, so its gradient is a sum over the ranks as well. Megatron calls these two operations
# g and f. Each is an identity in one direction and an all-reduce in the other.
#
# </details>
#
# Autograd does not differentiate `dist.all_reduce`. A class with its own forward and backward does it:
# `torch.autograd.Function`. (An identity that sends gradients twice as large is the usual first mistake. Why?)
#
# `ParallelMLP(w1, b1, w2, b2)` gets the whole tensors, equal on all ranks, and stores 1/n of `w1`, `b1` and `w2` as
# parameters. All ranks have all tokens, before and after it: `forward` maps (tokens, width) to (tokens, width).


# %% tags=["exercise"]
class ParallelMLP(nn.Module):
    def __init__(self, w1, b1, w2, b2):
        # nn.Parameter(…) of this rank's shards
        ...

    def forward(self, x):
        # two products, f before the first and g after the second
        ...


check("build_model_parallel.column_row", ParallelMLP)

# %% [markdown]
# This is what PyTorch's tensor parallelism sends in a step of the lab's GPT. How many all-reduces are there per block,
# and does your MLP send the same?

# %%
tp = run("tp", **place(2), workload="gpt", batch_size=4, steps=10).wait()
tp.ledger()

# %%
tp.figure("timeline")

# %% [markdown]
# ## 2. Sequence parallelism
#
# Between two MLPs every rank computes the same for all tokens: dropout, normalisation, residuals. Instead, each rank
# can have its own tokens there. Before the first product they are all-gathered; after the second the partial sums are
# *reduce-scattered*.
#
# **Predict:** how many bytes does a step send now, compared with exercise 1? Each collective needs its counterpart in
# backward. Which is the counterpart of an all-gather?
#
# `forward` maps this rank's tokens, (tokens / n, width), to (tokens / n, width). One thing is easy to forget: each rank
# adds `b2` to its own tokens only, but the ranks must update `b2` alike.


# %% tags=["exercise"]
class SequenceParallelMLP(nn.Module):
    def __init__(self, w1, b1, w2, b2):
        # as before
        ...

    def forward(self, x):
        # all-gather, two products, reduce-scatter
        ...


check("build_model_parallel.sequence", SequenceParallelMLP)

# %% [markdown]
# ## 3. A parallel cross-entropy
#
# The last layer of a language model is its largest: tokens × vocabulary logits. If the vocabulary is split, gathering
# the logits would send all of that. The loss needs much less: of each token the largest logit, the sum of the
# exponentials, and the logit of its target.
#
# `cross_entropy(logits, targets)` gets (tokens, vocabulary / n) logits of this rank's part of the vocabulary, and all
# targets as numbers of the whole vocabulary. It returns the mean over the tokens, on every rank. Logits can be as large
# as several thousand, and `exp(1000)` is infinite. At most three all-reduces of one number per token are allowed, in
# forward and backward together. Why does backward need none?


# %% tags=["exercise"]
def cross_entropy(logits, targets):
    # returns the mean loss; with its own backward
    ...


check("build_model_parallel.cross_entropy", cross_entropy)

# %% [markdown]
# ## 4. A pipeline: 1F1B
#
# The first stage sends activations to the second one, which sends back their gradients. In the order of GPipe, every
# stage computes all forwards and then all backwards. 1F1B alternates as soon as it can:

# %%
pictures.pipeline.gantt(pictures.pipeline.simulate("1F1B", ranks=4, micro_batches=6))

# %% [markdown]
# **Predict:** how many micro-batches are between their forward and their backward on rank 0? On the last rank? How many
# with GPipe?
#
# `one_f_one_b(stage, count, shape, inputs, loss_of)` is one step on one rank: `stage` is a module; there are `count`
# micro-batches; `shape` is the shape of every activation. On rank 0, `inputs` is a list of micro-batches, elsewhere
# `None`. On the last rank, `loss_of(output, number)` is the loss of a micro-batch, elsewhere `None`. The gradients of
# the stage's parameters must add up as in the whole model; the update is not yours. Each activation and each gradient
# is sent once.
#
# Send with `dist.isend` and receive with `dist.recv`, to and from the next and the previous rank. What you receive
# needs `requires_grad_()`, what you send `detach()`. `y.backward(gradient)` continues backward from a gradient that
# another rank has sent.


# %% tags=["exercise"]
def one_f_one_b(stage, count, shape, inputs, loss_of):
    # n − rank − 1 forwards, then alternate, then the remaining backwards
    ...


check("build_model_parallel.two_stages", one_f_one_b)

# %% [markdown]
# Two stages are special: each stage has one neighbour. The same function must also work with four, in this order (see
# the picture), with at most n − r live activations on rank r.

# %% tags=["exercise"]
check("build_model_parallel.four_stages", one_f_one_b)

# %% [markdown]
# ## 5. Ring attention
#
# With a long sequence, no rank can store all keys and values. Each rank has the queries, keys and values of its chunk
# of positions. Blocks of keys and values travel around a ring; each rank computes the attention of its queries to the
# block that it has at the moment, and passes the block on.
#
# The softmax is over *all* keys, which a rank never has at once. But two partial results can be combined, if the
# logarithm of the sum of exponentials is stored with each:
#
# > out = out₁ · exp(lse₁ − lse) + out₂ · exp(lse₂ − lse), with lse = log(exp(lse₁) + exp(lse₂))
#
# Attention is causal: a position sees itself and earlier positions. In backward the blocks travel once more, and with
# each the gradient of its keys and values. With p = exp(scores − lse), the gradient of the scores is p · (∂out vᵀ −
# sum(∂out · out)).
#
# `q`, `k` and `v` have the shape (heads, positions / n, dimension); the scores are divided by √dimension. Send to the
# next rank only and receive from the previous one: at most n times `k` and `v` in forward, n times these and their
# gradients in backward. Keep no keys and values of other ranks for backward.


# %% tags=["exercise"]
def ring_attention(q, k, v):
    # returns (heads, positions / n, dimension); with its own backward
    ...


check("build_model_parallel.ring_attention", ring_attention)

# %% [markdown]
# ## 6. A balanced ring
#
# **Predict:** rank 0 has the first positions. How many of the n blocks does it compute, and how many does the last
# rank? Which rank waits for which?
#
# A better assignment gives each rank one early and one late chunk: of 2n chunks, rank r has chunk r and chunk 2n − 1 −
# r, in this order. Every rank then has the same number of visible pairs of a chunk of queries and a chunk of keys:

# %%
n = 4
for rank in range(n):
    own = (rank, 2 * n - 1 - rank)
    visible = sum(key <= query for query in own for key in range(2 * n))
    print(f"rank {rank} has the chunks {own}: {visible} of {2 * 2 * n} pairs are visible")

# %% [markdown]
# Write a version for this assignment. The check counts the matrix products of forward: each rank may compute the 2n + 1
# visible pairs, and nothing else.


# %% tags=["exercise"]
def balanced_ring_attention(q, k, v):
    # as before; the first half of the positions is chunk r, the second half chunk 2n − 1 − r
    ...


check("build_model_parallel.balanced", balanced_ring_attention)

# %% [markdown]
# ## Summary
#
# | | sent per rank and step | what is split |
# | --- | --- | --- |
# | tensor parallelism | 2 all-reduces of the activations per MLP | products, parameters |
# | with sequence parallelism | the same bytes, as 2 all-gathers and 2 reduce-scatters | also the activations between |
# | parallel cross-entropy | 2 or 3 numbers per token | logits |
# | pipeline | the activations of each micro-batch, and their gradients | layers |
# | ring attention | n − 1 blocks forward, 2n blocks backward | positions |
#
# What the finished implementations add: overlap of the next block's transfer with the computation of this one, fused
# kernels, and meshes that combine these strategies ([lab 08](08_combine.py)).
