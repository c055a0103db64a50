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
# # One device first: FLOPs, bytes and the roofline
#
# Before a model is split over many devices, one device should be used well. **A training step of a small GPT needs 7
# billion floating-point operations. How many can your processor compute per second, how much of that does training use,
# and what limits the rest: computing, or moving bytes?**
#
# Take this lab after 00 and before 02. It takes 40 minutes. Its cells compute for about 1 minute on two cores. All
# figures are measured on your machine unless the text says *by formula*.

# %%
from labkit import Spec, check, excerpt, guess, pictures, place, predict, run

# %load_ext labkit

GPT = {"workload": "gpt", "samples": 64, "batch_size": 8, "steps": 6, "precision": "fp32"}
alone = Spec("single", **GPT, device=place(1)["device"])

# %% [markdown]
# ## The FLOPs of a step
#
# A product of matrices of *m × k* and *k × n* takes 2·m·k·n **FLOPs** (floating-point operations): a multiplication and
# an addition per pair. So in forward, each parameter of a matrix costs 2 FLOPs per token. Backward computes two such
# products, for the gradients of inputs and weights. With *N* parameters and *D* tokens that is **6ND** in total.
#
# A layer of width *h* has 12h² parameters in its matrices. Attention also multiplies queries with keys, and weights
# with values: 4·s·h FLOPs per token for *s* positions, without any parameters. (A causal mask hides half of them. By
# convention all are counted, as here and in the MFU that papers publish.) The head is a matrix of vocabulary × h.
#
# **Predict:** how many percent of the FLOPs does 6ND miss, if N counts the layers only?

# %%
layers, width, positions, vocabulary = 5, 128, 128, 256
tokens = GPT["batch_size"] * positions
forward = layers * (2 * 12 * width**2 + 4 * positions * width) + 2 * vocabulary * width  # per token
print(f"counted: {3 * forward * tokens / 1e9:.3f} GFLOP    6ND: {6 * layers * 12 * width**2 * tokens / 1e9:.3f} GFLOP")

# %% [markdown]
# The lab counts the same while it traces the script with tensors that have no data:

# %%
counted = predict(alone).to_json()
executed = counted["ranks"][0]["flops"]
print(f"counted: {counted['model_flops'] / 1e9:.3f} GFLOP for the model, {executed / 1e9:.3f} executed")

# %% [markdown]
# <details class="answer"><summary>Why are more executed than the model needs?</summary>
#
# Attention runs in a fused kernel (FlashAttention), which does not store the scores and computes them again in
# backward: 2·s·h FLOPs per token and layer. MFU, below, does not count this recomputation.
#
# </details>
#
# ## The roof
#
# A device has two limits: its **peak**, in FLOP/s, and the **bandwidth** of its memory. An operation with *F* FLOPs
# that moves *B* bytes takes at least max(F / peak, B / bandwidth). Its **arithmetic intensity** F/B says which.
#
# The next cell times the sum of two matrices of 4096 × 4096, and products of one with *k* columns, on one core or one
# GPU. **Predict:** how many columns does a product need to reach the peak?


# %%
# %%torchrun 1 --as timed
def seconds(work, *given):
    work(*given)  # warm-up
    took = []
    while sum(took) < 0.1 or len(took) < 3:
        start = time.perf_counter()
        work(*given)[0, 0].item()  # GPU work is asynchronous: wait for it
        took.append(time.perf_counter() - start)
    return min(took)


n, columns = 4096, [1, 4, 16, 64, 256]
a, b = torch.randn(2, n, n, device=device)
report(columns=columns, sum=seconds(b.add_, a))
report(products=[seconds(torch.mm, a, b[:, :k].contiguous()) for k in columns])

# %%
n = 4096
points = {"sum": [1 / 12, n**2 / timed["sum"][0]]}  # per number: one FLOP, 8 bytes read, 4 bytes written
for k, took in zip(timed["columns"][0], timed["products"][0]):
    flops, moved = 2 * n * n * k, 4 * (n * n + 2 * n * k)
    points[f"{k} columns" if k > 1 else "1 column"] = [flops / moved, flops / took]
peak = max(reached for _, reached in points.values())
bandwidth = max(reached / intensity for intensity, reached in points.values())
print(f"peak {peak / 1e9:,.0f} GFLOP/s, bandwidth {bandwidth / 1e9:.1f} GB/s: the best of these points")
pictures.roofline.ceiling(points, peak, bandwidth)

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# On the left, the memory limits: with one column, each number of the matrix is read for 2 FLOPs. On the right, the
# cores limit. Points between lie below the roof, because computing and moving do not overlap perfectly. By data sheet,
# an H100 bends at about 295 FLOP per byte in bf16 (989 TFLOP/s, 3.35 TB/s): sums, norms, activation functions and the
# optimizer are all limited by its memory.
#
# </details>
#
# ## MFU
#
# *Model FLOPs utilisation* is the FLOPs that the model needs, divided by the time of a step and the peak (Chowdhery et
# al. 2022). **Predict** the time of a step in ms, from the FLOPs and the peak.

# %%
my_guess = guess("step_ms", ...)
job = run(alone).wait()
my_guess

# %%
figures = job.summary()["ranks"][0]
step = figures["step_seconds_median"]
print(f"{step * 1e3:.0f} ms per step: MFU {counted['model_flops'] / step / peak:.0%}")
optimizer = (4 * 4 + 3 * 4) * figures["memory_bytes"]["parameters"] / 4  # reads p, g, m, v; writes p, m, v
print(f"optimizer: at least {1e3 * optimizer / bandwidth:.1f} ms for its bytes, by formula")
print(f"measured: {1e3 * figures['phase_seconds']['optimizer']:.1f} ms")

# %% [markdown]
# `labkit doctor --calibrate` measures the peak once, in half a minute. From then on, the panel and `labkit run` show
# MFU by themselves; until then, `job.summary()["mfu_missing"]` says what is missing.
#
# <details class="answer"><summary>What makes MFU low?</summary>
#
# Small matrices, operations that the memory limits, the optimizer, waiting; on GPUs also the launch of each kernel.
#
# </details>
#
# ## Activations by formula
#
# A layer stores for backward, per token: inputs and outputs of two norms (4h numbers), queries, keys, values and output
# of attention (4h), inputs and outputs of GELU (8h), and one number per head; the head its inputs, the logits and their
# softmax (Korthikanti et al. 2022, section 4, without dropout and with FlashAttention).
#
# **Predict:** how many MiB is that here? Does it grow with the batch, the parameters, or both?

# %%
heads = 4
of_layers = layers * (16 * width + heads) * 4 * tokens
of_head = (2 * width + 3 * vocabulary) * 4 * tokens
measured = figures["memory_bytes"]["activations"]
print(f"by formula {(of_layers + of_head) / 2**20:.1f} MiB, measured {measured / 2**20:.1f} MiB")
job.figure("memory_of_step")

# %% [markdown]
# ## Recomputation: time for memory
#
# `checkpoint_activations` stores only the input of each block, and runs the block again in backward (*full*
# recomputation). **Predict** the peak memory of a step in MiB. How much longer should a step take?

# %%
my_guess = guess("peak_mb", ...)
again = run(alone, options={"checkpoint_activations": True}).wait()
my_guess

# %%
for name, one in {"stored": job, "recomputed": again}.items():
    rank = one.summary()["ranks"][0]
    backward = 1e3 * rank["phase_seconds"]["backward"]
    print(f"{name:10} peak {rank['peak_memory_bytes'] / 2**20:5.1f} MiB, backward {backward:.0f} ms")

# %% [markdown]
# <details class="answer"><summary>How much by formula?</summary>
#
# One more forward on top of three: a third more computation at most. Torch stops at the last tensor that backward
# needs, so the last product of each block is not repeated. If attention were not fused, recomputing only its scores, s
# numbers per head and token, would save most for few FLOPs (*selective*, Korthikanti et al. 2022, section 5).
#
# </details>
#
# ## Accumulation, and what it costs with several devices
#
# Instead of recomputing, split the batch into *m* micro-batches and add their gradients. With n ranks, the price
# depends on the strategy. By formula, with U = (n − 1)/n · 4P bytes:
#
# | | gradients | parameters | per rank and step |
# | --- | --- | --- | --- |
# | DDP with `no_sync` | all-reduce with the last micro-batch | – | 2U |
# | DDP without it | all-reduce with each one | – | 2mU |
# | ZeRO-1 (torch) | as DDP with `no_sync` | broadcast once | 3U |
# | ZeRO-2 | reduce-scatter with each one | gathered once | (m + 1)U |
# | ZeRO-3, FSDP2 | reduce-scatter with each one | gathered twice with each one | 3mU |

# %%
HERE = place(2)  # two GPUs if this machine has them, otherwise two CPU ranks
four = {**GPT, **HERE, "steps": 3, "options": {"accumulate": 4}}
excerpt(Spec("ddp", **four), "gradient_sync", "train_step")

# %% [markdown]
# **Predict** the traffic of FSDP2 with m = 4, in MiB per rank and step. A rank of DDP sends 4.1 MiB, for any m.

# %%
my_guess = guess("sent_mb", ...)
accumulated = run("fsdp2", **four).wait()
my_guess

# %%
accumulated.ledger()  # gloo implements a reduce-scatter as an all-reduce

# %% [markdown]
# ## Precision: bytes per parameter
#
# | | computation | parameters + gradients + optimizer, bytes |
# | --- | --- | --- |
# | fp32 | 32 bits | 4 + 4 + 8 |
# | tf32 | products with 10 bits of mantissa (GPUs) | 4 + 4 + 8 |
# | bf16 autocast | most in bf16 | 4 + 4 + 8 |
# | fp16 autocast with scaling | most in fp16 | 4 + 4 + 8, and one scale |
# | bf16 with an fp32 copy | bf16 | 2 + 2 + 12 |
# | bf16 states | bf16 | 2 + 2 + 4 |
#
# **Predict** which figures below are less than 16, and the last three.


# %%
# %%torchrun 1
def stored(autocast=None, states=torch.float32):
    model = torch.nn.Linear(512, 512).to(device, states)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler(device.type, init_scale=256.0, enabled=autocast == torch.float16)
    with torch.autocast(device.type, autocast, enabled=autocast is not None):
        loss = model(torch.randn(64, 512, device=device, dtype=states)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    parameters = [*model.parameters()]
    moments = [one for p in parameters for one in optimizer.state[p].values() if one.dim()]
    every = [*parameters, *(p.grad for p in parameters), *moments]
    return sum(one.nbytes for one in every) / sum(p.numel() for p in parameters)


report(fp32=stored(), bf16_autocast=stored(torch.bfloat16), fp16_autocast=stored(torch.float16))
report(bf16_states=stored(states=torch.bfloat16))
report(one_plus_a_thousandth_in_bf16=(torch.ones(()).bfloat16() + 0.001).item())
report(small_gradient_in_fp16=torch.tensor(1e-8).half().item(), scaled=(torch.tensor(1e-8) * 2**16).half().item())

# %% [markdown]
# <details class="answer"><summary>What do the last three say?</summary>
#
# bf16 has 8 significant bits: an update below 1/256 of a parameter may be lost. So bf16 states need stochastic rounding
# or an fp32 copy, which makes it 16 bytes again. fp16 has more bits but a small range: gradients below 3e-8 become 0
# unless the loss is scaled before backward. Autocast halves many activations, not the states.
#
# </details>
#
# ## Exercises
#
# **1.** The FLOPs of a step (forward and backward) of a Llama, exactly. It differs from the GPT above in two ways. The
# heads of keys and values are fewer: each is shared by `groups` heads of queries. And the MLP has three matrices of
# width × `inner`: gate, up and down.


# %% tags=["exercise"]
def flops(tokens, layers, width, inner, groups, sequence, vocabulary): ...


check("one_device.flops", flops)

# %% [markdown]
# The figures of the next three are drawn for you: run a cell with the three dots, and the verdict says what they are.
#
# **2.** The MFU of a training by 6ND, in percent.

# %% tags=["exercise"]
percent = ...
check("one_device.mfu", percent)

# %% [markdown]
# **3.** The shortest time of a matrix product, in µs.

# %% tags=["exercise"]
microseconds = ...
check("one_device.least", microseconds)

# %% [markdown]
# **4.** Bytes per parameter of a recipe that is not in the table, with gradients.

# %% tags=["exercise"]
per_parameter = ...
check("one_device.bytes", per_parameter)
