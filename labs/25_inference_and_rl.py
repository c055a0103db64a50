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
# # Inference and reinforcement learning: the same weights in two layouts
#
# In reinforcement learning (RL), a language model writes answers, is judged, and is trained on what it wrote; then the
# new weights write again. **Writing reads all weights for every single token. Which layout suits that? And how do the
# weights get from the ranks that train them to the ranks that sample, in every step, without any rank ever holding all
# of them?**
#
# You measure prefill, decode and the KV cache of a small GPT, compare tensor parallelism with replicas, meet the hang
# that everyone meets who generates with a sharded model, and hand weights over in three ways. Take labs
# [05](05_fsdp.py), [06](06_tensor_parallel.py) and [18](18_one_device.py) first.
#
# This lab takes about 60 minutes. Its cells compute for about 1 minute on two cores, and a check for up to a minute.

# %%
import inspect

import torch

from labkit import check, pictures, run, starter

# %load_ext labkit
torch.set_num_threads(1)  # one core, as the ranks below have

# %% [markdown]
# ## Prefill and decode
#
# Generation has two phases. **Prefill** passes the whole prompt through the model at once. **Decode** then makes one
# token after the other, because each needs the one before. The keys and values of earlier positions do not change, so
# they are kept: the **KV cache**. The cell writes `sampler.py` next to the notebook, a GPT with 12.6 million parameters
# in its layers. This is its attention:

# %%
script = starter("inference.weights")
import sampler

print(inspect.getsource(sampler.Layer.attend))

# %% [markdown]
# A decode step has one new token per sequence; prefill has 128. **Predict:**
#
# 1. One token costs 1/128 of the operations of the prefill. Does it take 1/128 of the time?
# 2. How much longer does a decode step take with 4 sequences than with one? With 64?
# 3. Without a cache, each token recomputes everything before it. How many times slower is that?

# %%
torch.manual_seed(0)
model = sampler.GPT()
weights = sum(parameter.nbytes for parameter in model.layers.parameters())
cached = 2 * len(model.layers) * sampler.WIDTH * 4  # bytes of the cache per position
shapes = {"prefill of 128 tokens": (1, 128, 0)} | {f"decode, batch {n}": (n, 1, 128) for n in (1, 4, 16, 64)}
points = {}
for name, (batch, new, seen) in shapes.items():
    seconds = sampler.seconds(model, batch, new, seen)
    flops, moved = 2 * weights / 4 * batch * new, weights + batch * seen * cached
    points[name] = flops / moved, flops / seconds
    print(f"{name:22} {1e3 * seconds:6.1f} ms, {batch * new / seconds:6.0f} tokens/s, {moved / 2**20:4.0f} MiB read")

# %% [markdown]
# Without a cache, every step passes all 129 tokens through the model:

# %%
for batch in (1, 8):
    seconds = sampler.seconds(model, batch, new=129, count=3)
    print(f"without a cache, batch {batch}: {1e3 * seconds:6.1f} ms per step, {batch / seconds:4.0f} tokens/s")

# %% [markdown]
# The points with a cache as a roofline ([lab 18](18_one_device.py)), of one core:

# %%
peak = max(reached for _, reached in points.values())
bandwidth = max(reached / intensity for intensity, reached in points.values())
print(f"measured here: {peak / 1e9:.0f} GFLOP/s, {bandwidth / 1e9:.1f} GB/s: the best of these points")
pictures.roofline.ceiling(points, peak, bandwidth)

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# 1. No. Decode computes little and still reads every weight: 48 MiB for one token. Its time is that of reading.
# 2. Much less than 4 times: the weights are read once per step, whatever the batch. So throughput grows with the batch,
#    until the caches, which each sequence brings, are as large as the weights (2 MiB per sequence here), or until the
#    cores are busy.
# 3. As slow as a prefill for every token, so that batching gains nothing. The cache turns computing into memory.
#
# The same in the picture: prefill is under the flat part of the roof (*compute-bound*), decode with a small batch under
# the slope (*bandwidth-bound*). Austin et al. 2025 (*How to scale your model*, chapter 7) derive it for TPUs: about 240
# tokens at a time are needed there.
#
# </details>
#
# ## The same on a real GPU, modelled
#
# Nothing is measured here: an H100 by its data sheet (989 TFLOP/s in bf16, 3.35 TB/s), and a model with the shape of
# Llama 3 8B (Grattafiori et al. 2024, table 3: 32 layers, 8 key-value heads of 128). A step takes as long as its
# operations or its bytes, whichever is longer. **Predict:** with 16,384 tokens of context, from which batch on is
# decode compute-bound?

# %%
PARAMETERS, POSITION = 8.0e9, 2 * 2 * 32 * 8 * 128  # the second: bytes of the cache per position, in bf16
FLOPS, BANDWIDTH = 989e12, 3.35e12
modelled = {"modelled: prefill, 2,048": (2048.0, FLOPS)}  # 2 operations per parameter and token, 2 bytes read
for context in (2048, 16384):
    for batch in (1, 16, 256):
        flops, moved = 2 * PARAMETERS * batch, 2 * PARAMETERS + batch * context * POSITION
        seconds = max(flops / FLOPS, moved / BANDWIDTH)
        modelled[f"modelled: batch {batch}, {context:,}"] = flops / moved, flops / seconds
        print(
            f"modelled: context {context:6,}, batch {batch:3}: {1e3 * seconds:6.1f} ms per token,"
            f" {batch / seconds:6,.0f} tokens/s, weights and caches {moved / 1e9:5,.0f} GB"
        )

# %%
pictures.roofline.ceiling(modelled, FLOPS, BANDWIDTH)  # by the model, every point lies on the roof

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# From none. Each sequence adds operations, and its cache to read. With 16,384 tokens these are 2.1 GB, which take 0.64
# ms to read, while the operations take 0.016 ms. Without caches, it would be a batch of 295. Memory ends before that:
# with 80 GB, 238 sequences of 2,048 tokens fit, or 29 of 16,384.
#
# Two consequences. Serving systems pack the cache: if each sequence reserves room for the longest one, only 20 to 38 %
# of it held tokens in the systems that Kwon et al. 2023 measured; PagedAttention (vLLM) allocates blocks instead. And
# prefill and decode disturb each other on one GPU: a long prompt delays all sequences that decode. So DistServe (Zhong
# et al. 2024) gives them different GPUs and layouts, and sends the cache from one to the other; Sarathi-Serve (Agrawal
# et al. 2024) cuts the prompt into chunks.
#
# </details>
#
# ## The bytes of the cache
#
# For every layer, position and key-value head: a key and a value. With **grouped-query attention** (Ainslie et al.
# 2023), several heads of queries share a key and a value. **Predict** the MiB for 4 sequences of 192 positions, with 8
# heads of width 64, 4 layers and fp32; and what 2 key-value heads make of it.

# %%
for kv_heads in (8, 2, 1):
    caches = sampler.GPT(kv_heads=kv_heads).new_cache(batch=4)
    measured = sum(cache.nbytes for cache in caches)
    by_formula = 2 * len(caches) * 4 * 192 * kv_heads * 64 * 4
    print(f"key-value heads: {kv_heads}; {measured / 2**20:.1f} MiB measured, {by_formula / 2**20:.1f} by formula")

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# 12 MiB, 3 and 1.5. By formula, Llama 3 70B (80 layers, 64 heads of width 128, 8 key-value heads) has 320 KiB per
# position in bf16, and with 64 key-value heads it would be 2.5 MiB: a sequence of 8,192 tokens would need 20 GiB.
#
# </details>
#
# ## Tensor parallelism or replicas
#
# Two GPUs can be two replicas with half of the sequences each, or one sampler that is split: half of the heads, of the
# hidden units and of the cache each, and two all-reduces per layer ([lab 06](06_tensor_parallel.py)). **Predict**, for
# 2 and for 32 sequences in total: which has the shorter time per token (*latency*), and which makes more tokens per
# second (*throughput*)? What does each rank store, and what does it send per token?
#
# The ranks stay for the rest of the lab ([keep ranks](../labkit/reference/keep-ranks.md)).

# %%
# %%torchrun 2 --keep
import sys

sys.path.insert(0, os.getcwd())  # where sampler.py is
import sampler

torch.manual_seed(0)
replica, split = sampler.GPT(), sampler.GPT(ranks=2)
for name, model in {"replica": replica, "split": split}.items():
    stored, cache = (sum(tensor.nbytes for tensor in held) for held in (model.parameters(), model.new_cache(1)))
    print(f"{name}: {stored / 2**20:.0f} MiB of weights, {cache / 2**20:.1f} MiB of cache per sequence")

# %%
# %%ranks
for total in (2, 32):
    for name, seconds in {
        "2 replicas": sampler.seconds(replica, total // 2, seen=128),
        "split in 2": sampler.seconds(split, total, seen=128),
    }.items():
        if rank == 0:
            print(f"{total:2} sequences, {name}: {1e3 * seconds:5.1f} ms per token, {total / seconds:5.0f} tokens/s")

# %% [markdown]
# Where does the time of the split one go? Its message is small: 512 numbers per sequence. **Predict** how much longer
# an all-reduce of 64 KiB takes than one of 2 KiB.

# %%
# %%ranks
for size in (2 << 10, 64 << 10, 1 << 20, 8 << 20):
    message, times = torch.zeros(size // 4), []
    for _ in range(9):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(message)
        times.append(time.perf_counter() - began)
    if rank == 0:
        print(f"{size >> 10:5} KiB: {1e6 * sorted(times)[4]:7.0f} µs, {size / sorted(times)[4] / 1e9:.2f} GB/s")

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# The split sampler reads half of the weights per rank, so a token can take about half of the time, plus 8 all-reduces.
# Replicas send nothing, and each reads all weights for half of the sequences. With few sequences splitting wins
# latency. With many, replicas catch up in throughput, unless the split leaves room for a larger batch: a rank stores
# half of the weights. A model that does not fit one GPU leaves no choice. (Here both ranks share one memory, and a busy
# machine delays whoever waits for the other.)
#
# The short messages take about as long as each other: the call costs more than its bytes. It is the same on GPUs, by
# NCCL's own constants: 7 to 8 µs per call in a ring before the first byte (`tuning.cc`), while 16 sequences of Llama 3
# 70B send 256 KiB, which take 0.6 µs at 450 GB/s. With 160 all-reduces per token, latency decides. So decode splits
# within a node only, and vLLM has a special all-reduce for short messages (`--disable-custom-all-reduce` turns it
# off). Prefill sends the same messages for thousands of tokens: there the bandwidth decides.
#
# </details>
#
# ## The hang that everyone meets
#
# Can the trainer's ranks sample by themselves, with the weights sharded as they are? Run as a script, `sampler.py`
# shards the model with FSDP2, and each rank generates its own text, until it ends: three tokens on rank 0, six on
# rank 1. **Predict** what each rank waits for, and where.

# %%
print(inspect.getsource(sampler.sample))

# %%
two = {"nproc": 2, "device": "cpu"}
alone = run(script, **two, args=("alone",), hang_after=3).wait(until="hang")
alone.findings()

# %%
print(alone.stop().words)
together = run(script, **two, args=("together",)).wait()
print(together.logs(rank=0), together.logs(rank=1))

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# The forward of a sharded model is a collective: it gathers each layer from all ranks. Rank 0 has its text and goes on,
# into the all-reduce of what comes next; rank 1 wants one more token. With NCCL this lasts until the watchdog's timeout
# of 10 minutes. The remedy is to compute on, for nothing, until all are done: a flag is reduced before every token. The
# `generate` of transformers does it with `synced_gpus=True`, by default under FSDP since [pull request
# 33483](https://github.com/huggingface/transformers/pull/33483). It is still being met: [DeepSpeed issue
# 8262](https://github.com/deepspeedai/DeepSpeed/issues/8262) of 2026 has it between student and teacher.
#
# It also is slow. A token reads all weights, and here they arrive over the link every time: for 8B parameters in bf16,
# nearly 16 GB per token and rank. Gather once before the loop, or use a sampler with another layout.
#
# </details>
#
# ## Handing weights over
#
# The trainer has FSDP2 shards: rows of every weight, on dimension 0. The sampler is split: by columns (`query`, `key`,
# `value`, `up`: outputs, which are rows of `weight`) and by rows (`merge`, `down`: inputs, which are columns of
# `weight`). Here both are on the same two ranks, *colocated*. Three ways:
#
# 1. gather the whole model on every rank, and keep a part
# 2. the same, one weight after the other
# 3. send only what changes its rank
#
# **Predict** for each the MiB that a rank sends, and the MiB of whole weights that it holds at once. The model has 49
# MiB; 5/12 of the layers are `merge` and `down`. The heading of each cell has the bytes sent.


# %%
# %%ranks
import torch._dynamo  # fully_shard loads it, which takes a while; a rank inside of it would look as if it waited
from torch.distributed.fsdp import fully_shard

trainer = sampler.GPT()
for unit in (*trainer.layers, trainer):
    fully_shard(unit, mesh=dist.init_device_mesh("cpu", (2,)))
shards = {name: parameter.detach() for name, parameter in trainer.named_parameters()}
targets = {name: parameter.detach() for name, parameter in split.named_parameters()}


def part_of(name, whole):
    """What this rank has of a whole weight in the layout of the sampler."""
    if not name.startswith("layers"):
        return whole  # embeddings and head are replicated
    return whole.chunk(2, dim=1 if name.endswith(("merge.weight", "down.weight")) else 0)[rank]


# %% [markdown]
# The whole model:

# %%
# %%ranks
whole = {name: shard.full_tensor() for name, shard in shards.items()}
for name, target in targets.items():
    target.copy_(part_of(name, whole[name]))
print(f"{sum(weight.nbytes for weight in whole.values()) / 2**20:.0f} MiB of whole weights at once")
del whole

# %% [markdown]
# One weight after the other:

# %%
# %%ranks
largest = 0
for name, target in targets.items():
    weight = shards[name].full_tensor()
    target.copy_(part_of(name, weight))
    largest = max(largest, weight.nbytes)
print(f"{largest / 2**20:.0f} MiB of whole weights at once")

# %% [markdown]
# Only what changes its rank. A rank's rows are already what it needs of a column split. For a row split, each rank
# sends half of its columns:


# %%
# %%ranks
def exchanged(shard):
    halves = [half.contiguous() for half in shard.chunk(2, dim=1)]
    received = [torch.empty_like(half) for half in halves]
    dist.all_to_all(received, halves)
    return torch.cat(received)


for name, target in targets.items():
    target.zero_()
    if name.endswith(("merge.weight", "down.weight")):
        target.copy_(exchanged(shards[name].to_local()))
    else:
        target.copy_(shards[name].to_local() if name.startswith("layers") else shards[name].full_tensor())

# %% [markdown]
# Are the weights in place?

# %%
# %%ranks
equal = [torch.equal(target, part_of(name, shards[name].full_tensor())) for name, target in targets.items()]
print(f"{sum(equal)} of {len(equal)} weights of the sampler are equal to those of the trainer, bit by bit")

# %%
# %ranks stop

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# 1 and 2 send the same: half of everything, 25 MiB. But 1 holds the whole model, which the trainer was sharded to
# avoid, and 2 only one weight of 4 MiB. 3 sends 6 MiB: a quarter of the row-split weights, and half of the embeddings
# and the head. Query, key, value and up are in place already.
#
# Real systems do 2 or 3. OpenRLHF (Hu et al. 2024) gathers one ZeRO-3 parameter after the other and broadcasts it to
# the vLLM engines, which keep their part. The 3D-HybridEngine of HybridFlow (Sheng et al. 2024; its code is verl)
# chooses the groups of the two layouts so that a rank's training shard is a part of what it samples with: no redundant
# memory, and less to send.
#
# </details>
#
# ## Staleness: whose samples are these?
#
# The gradient of RL is an average over answers of the *current* policy. With samples of older weights it is another
# gradient. The factor π_new / π_old corrects it (*importance sampling*), but then few samples count.
#
# The cell computes both exactly, without sampling, for a policy over 1,000 answers that learns for 12 steps.
# **Predict** what 1, 4 and 8 steps of age do to the gradient, and to the share of samples that still count.


# %%
def gradient(old, new, factor=1.0):
    """Of the expected reward of `new` by its logits, from answers that `old` samples (REINFORCE with a baseline)."""
    score = factor * old * (rewards - old @ rewards)
    return score - score.sum() * new


torch.manual_seed(0)
rewards, logits, policies = torch.randn(1000), torch.zeros(1000), []
for _ in range(13):
    policies.append(logits.softmax(0))
    logits = logits + 20 * gradient(policies[-1], policies[-1])

# %%
new = policies[-1]
right = gradient(new, new)
for age in (0, 1, 4, 8):
    old = policies[-1 - age]
    errors = [(gradient(old, new, factor) - right).norm() / right.norm() for factor in (1.0, new / old)]
    useful = 1 / (new**2 / old).sum()  # the effective share of the samples (Kong 1992)
    print(f"{age} steps old: error {errors[0]:.0%}, corrected {errors[1]:.0%}; {useful:.0%} of the samples count")

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# The error grows with the age, and with how fast the policy changes. The correction removes it, but fewer samples
# count, because an answer that the old policy rarely gave has a large factor. Here the policy changes slowly.
#
# *On-policy* therefore means: generate, train, hand over, generate, and one side waits for the other. Asynchronous
# systems let both run, with weights that are one or a few updates old (Noukhovitch et al. 2024, *Asynchronous RLHF*);
# NeMo RL limits it by `max_trajectory_age_steps`, and TRL by `max_staleness`. Per step, generation and training then
# take the longer of the two times instead of their sum.
#
# | | colocated | disaggregated |
# | --- | --- | --- |
# | ranks | train and sample in turn (verl; TRL's `"colocate"`) | do one of both (OpenRLHF; TRL's `"server"`) |
# | weights | change their layout in place | travel to other ranks |
# | memory | optimizer states or KV cache: one has to leave | each has its own |
# | idle | nobody, but no overlap | one side, unless samples may be stale |
#
# </details>
#
# ## Exercise: what a sampler holds, and what limits it
#
# Write `served(model, gpu, tp, context)` for a model in bf16 that `tp` GPUs share by tensor parallelism. `model` is a
# dict with `parameters`, `layers`, `heads`, `kv_heads` and `head_width`; `gpu` one with `memory` (bytes), `flops` and
# `bandwidth` (per second). All sequences have `context` positions. Return four numbers, per GPU:
#
# 1. bytes of weights; embeddings are split as well
# 2. bytes of the cache of one sequence; a key-value head is not split
# 3. the largest batch that fits
# 4. the batch from which on a decode step is compute-bound, or `math.inf`. Count 2 operations per parameter and
#    sequence, and as bytes the weights once and the cache of each sequence


# %% tags=["exercise"]
def served(model, gpu, tp, context): ...


check("inference.memory", served)

# %% [markdown]
# ## Exercise: hand the weights over
#
# Four ranks, disaggregated: 0 and 1 train, 2 and 3 sample. Write `hand_over(matrices, shards)`, which every rank calls
# after each update.
#
# - `matrices` has, by name, `(rows, columns, split)` of each weight, in the same order on all ranks
# - `shards` has a trainer's part of each weight in fp32: `weight.chunk(2)[rank]`, as under FSDP2, so that the first
#   trainer has one row more if their number is odd. It is empty on samplers
# - a sampler returns its parts by name in **bf16**: for `"column"` half of the rows, for `"row"` half of the columns
#
# The check draws shapes and weights, and makes two updates. It measures what the samplers end with, the bytes that each
# rank sends, and the largest number of bytes of new tensors on each rank: a sampler may have its part and two weights
# in bf16, a trainer two weights. **Predict** the bytes that each trainer has to send, and those of a sampler.


# %% tags=["exercise"]
def hand_over(matrices, shards):
    # dist.send and dist.recv, or an all-to-all
    ...


check("inference.weights", hand_over)

# %% [markdown]
# ## Summary
#
# | | training | prefill | decode |
# | --- | --- | --- | --- |
# | tokens at once | a batch of whole texts | a prompt | one per sequence |
# | limited by | operations | operations | bytes of weights and caches |
# | besides weights | gradients, optimizer, activations | the cache that it writes | the cache that it reads |
# | layout | FSDP, and more | tensor parallel | tensor parallel within a node, times replicas |
#
# RL needs both layouts of the same weights in every step. What has to travel is what one side lacks, one weight at a
# time; how often it travels decides how old the samples are.
