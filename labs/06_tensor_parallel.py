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
# # Tensor parallelism: one matrix product on several ranks
#
# A single layer of a large model has matrices that fill a GPU. Sharding (labs 04 and 05) only *stores* them in shards,
# and gathers them to compute. **Can two ranks compute one matrix product, each with only its shard, and what do they
# have to communicate?**
#
# In this lab you split a small network by hand, with numbers that you can check. Then you look at a transformer that is
# split this way. The cells of this lab compute for about 1 minute on two cores.

# %%
import torch

from labkit import Spec, check, excerpt, guess, pictures, place, run, show

HERE = place(2)  # two GPUs if this machine has them, otherwise two CPU ranks
# %load_ext labkit

# %% [markdown]
# ## Two ways to split
#
# $$Y = \mathrm{relu}(X A)\, B$$
#
# is the MLP in every transformer layer. Each row of `X` is a sample. These matrices are small enough for mental
# arithmetic:

# %%
X = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
A = torch.tensor([[1.0, 0.0, 2.0, -1.0], [2.0, 1.0, -1.0, 0.0]])
B = torch.tensor([[1.0, 0.0], [2.0, 1.0], [0.0, 3.0], [1.0, 1.0]])
H = torch.relu(X @ A)
Y = H @ B
print(Y)

# %% [markdown]
# **By columns.** A column of the product needs one column of `A` and all of `X`. Blue data is on rank 0, orange data on
# rank 1, and grey data on both.

# %%
pictures.tensor_parallel.column(X.tolist(), A.tolist())

# %% [markdown]
# **By rows.** If the ranks have columns of `H`, they need only the matching *rows* of `B`. Each rank gets a partial sum
# of the whole product.

# %%
pictures.tensor_parallel.row(H.tolist(), B.tolist())

# %% [markdown]
# **Predict:** for both products together, how often must the ranks communicate if `A` is split by columns and `B` by
# rows? And if `A` is split by rows and `B` by columns?
#
# <details class="answer"><summary>Answer</summary>
#
# Columns, then rows: **once**, at the end. The result of the first product on a rank is exactly its input for the
# second, and relu, which works elementwise, can be applied in between.
#
# Rows, then columns: **twice**. After the first product each rank has partial sums, and relu of a partial sum is not a
# partial sum of relu, so they must be reduced *before* relu. At the end each rank has some columns of `Y`, and the next
# layer needs all of them.
#
# </details>

# %%
pictures.tensor_parallel.pair(X.tolist(), A.tolist(), B.tolist())

# %% [markdown]
# The same on two ranks. They **stay** for several cells, with their variables: `%%torchrun 2 --keep` starts them,
# `%%ranks` runs a cell on them, and `%ranks push` gives them a variable of the notebook.

# %%
# %%torchrun 2 --keep
print("columns", 2 * rank, "and", 2 * rank + 1, "of A, and the same rows of B")

# %%
# %ranks push X
# %ranks push A
# %ranks push B

# %% [markdown]
# Each rank keeps its shards, and computes both products without communication. **Predict:** what is `y` on each rank?

# %%
# %%ranks
X, A, B = X.to(device), A.to(device), B.to(device)
column, row = A.chunk(2, dim=1)[rank], B.chunk(2, dim=0)[rank]
y = torch.relu(X @ column) @ row
y

# %% [markdown]
# Two partial sums, and neither is `Y`. The all-reduce adds them, on both ranks:

# %%
# %%ranks
dist.all_reduce(y)
y

# %% [markdown]
# Compare it with `Y` above. Now split the other way, without the all-reduce in the middle. Is the sum still `Y`?

# %%
# %%ranks
h = X[:, rank : rank + 1] @ A[rank : rank + 1]  # by rows: a partial sum of X A
wrong = torch.relu(h) @ B
dist.all_reduce(wrong)
wrong

# %% [markdown]
# ## And backward?
#
# Forward needs one all-reduce, at the end. **Predict:** each rank has the whole gradient of `Y`, because all ranks
# compute the same loss from it. Does a rank then have the whole gradient of its row shard, of its column shard, and of
# `X`?

# %%
# %%ranks
x, a_shard, b_shard = (tensor.clone().requires_grad_() for tensor in (X, column, row))
(torch.relu(x @ a_shard) @ b_shard).sum().backward()  # the gradient of each number in Y is 1
print("a_shard:", a_shard.grad.tolist())
print("b_shard:", b_shard.grad.tolist())
print("X:      ", x.grad.tolist())

# %% [markdown]
# These are the gradients on one device. Which of those above are parts of them, and which are not?

# %%
x, a, b = (tensor.clone().requires_grad_() for tensor in (X, A, B))
(torch.relu(x @ a) @ b).sum().backward()
print("A:", a.grad.tolist(), "\nB:", b.grad.tolist(), "\nX:", x.grad.tolist())

# %% [markdown]
# The gradients of `X` differ: a rank knows only the paths through *its* columns, so it has a partial sum again. Add
# them up:

# %%
# %%ranks
dist.all_reduce(x.grad)
x.grad

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# The gradients of the shards are complete: a shard is used on one rank only, with the whole input or the whole gradient
# of `Y`. That of `X` must be added up. So there are two all-reduces, one in each direction. Shoeybi et al. (2019)
# call them **g**, which adds in forward and does nothing in backward, and **f**, which does nothing in forward and adds
# in backward. Every pair of split matrices stands between an f and a g.
#
# </details>

# %% [markdown]
# ## Why all ranks need the same input
#
# In data parallel training, each rank has different samples. Here every rank must have the *same* `X`.
#
# **Predict:** what happens if each rank uses a different batch? Is there an error?

# %%
# %%ranks
torch.manual_seed(rank)
for name, mine in {"same_input": X, "different_input": torch.randn(2, 2).to(device)}.items():
    y = torch.relu(mine @ column) @ row
    dist.all_reduce(y)
    error = (y - torch.relu(mine @ A) @ B).abs().max()
    report(**{name: f"{error:.5f}"})

# %%
# %ranks stop

# %% [markdown]
# <details class="answer"><summary>What the table says</summary>
#
# With the same input, the sum is right. With different inputs, the ranks add a partial sum of *one* sample to a partial
# sum of *another*. The shapes match, so there is no error: the model just learns nothing. The lab checks for this: if
# ranks that share a layer have different losses, the run gets the finding `loss_differs`.
#
# </details>
#
# So tensor parallel ranks count as **one** rank for the batch, however many there are:

# %%
for strategy in ("ddp", "tp"):
    print(f"{strategy:4}", Spec(strategy=strategy, workload="gpt", nproc=2).batch_sentence)

# %% [markdown]
# ## A transformer
#
# A transformer layer has two such pairs. The first is attention: query, key and value are split by columns, so that
# each rank has some **heads**, and the output projection by rows. The second is the MLP. A norm needs the whole vector
# of a token. A residual addition does not: it adds number by number. But both of its inputs are whole on every rank by
# then, so that every rank computes all of both.

# %%
pictures.tensor_parallel.layer()

# %% [markdown]
# In the script this is a table that maps modules to styles, and one call of `parallelize_module` per block:

# %%
spec = Spec(strategy="tp", workload="gpt", **HERE, batch_size=8, steps=10, samples=80)
excerpt(spec, "tensor_plans", "parallelize")

# %% [markdown]
# **Predict** before you run. This GPT has 5 layers of width 128, and a step processes 8 sequences of 128 positions, in
# numbers of 4 bytes.
#
# 1. How many all-reduces does a step need, forward and backward? (In backward, the gradient of a column-parallel
#    layer's input is a sum over both ranks.)
# 2. How many bytes does one of them reduce?
# 3. On two ranks, a rank sends as many bytes as it reduces. How many MiB does it send per step?
# 4. Which fraction of all parameters does each of the two ranks store: half, or more?

# %%
my_guess = guess("sent_mb", ...)  # MiB per rank and step
split = run(spec)
show(split)

# %%
split.wait()
my_guess

# %%
split.ledger()

# %% [markdown]
# <details class="answer"><summary>How many were expected, and why were there more?</summary>
#
# Expected: two in each direction per layer and one after the head, which is 4 · 5 + 1 = 21, each of 8 · 128 · 128
# numbers of 4 bytes or 0.5 MiB: 10.5 MiB per rank.
#
# See the reason in the ledger. Query, key and value are three matrices with the same input. Each one all-reduces its
# own input gradient, although a single all-reduce of their sum would be enough: that is two more all-reduces per layer.
# Also, the logits are all-gathered, because each rank has the logits of only a part of the vocabulary.
#
# </details>
#
# Megatron-LM calls the two places where a layer communicates *f* and *g*. Each is an identity in one direction, and
# the all-reduce of the other one:

# %%
pictures.tensor_parallel.layer(backward=True)

# %% [markdown]
# How many parameters does each rank store? Only the matrices in the plan are split. Embeddings, norms and some biases
# are replicated.

# %%
whole = spec.workload_row.parameters(spec.options)
for each in split.summary()["ranks"]:
    stored = each["memory_bytes"]["parameters"] / 4
    print(f"rank {each['rank']}: {stored:,.0f} of {whole:,} parameters, {stored / whole:.0%}")

# %% [markdown]
# Now look at where the time goes. Every all-reduce of this script is **exposed**: the next matrix product needs its
# result. DDP overlaps its all-reduces with backward; here there is little to overlap with. This is why tensor
# parallelism is used where the interconnect is fastest: within a machine.
#
# There is something to overlap with if a product is cut into pieces: one is sent while the next is computed (Wang et
# al. 2023). PyTorch calls it *async tensor parallelism*; `torch.compile` does it on GPUs with NVLink if
# `torch._inductor.config._micro_pipeline_tp` is set. And backward computes two products, of which only one needs to be
# summed over the ranks: Megatron-LM sends that one while it computes the gradient of the weights.

# %%
split.figure("timeline")

# %% [markdown]
# ## Sequence parallelism
#
# Between the split matrices, every rank stores the *same* activations and computes the *same* norms. Sequence
# parallelism (Korthikanti et al. 2022) splits them along the sequence dimension, so that each rank has only some
# **positions**. An all-reduce is a reduce-scatter followed by an all-gather: separate the two, and compute the norm in
# between.

# %%
pictures.tensor_parallel.layer(sequence_parallel=True)

# %% [markdown]
# **Predict:** does it send more or less? What becomes smaller? What is the peak memory of a rank, in MiB? Without
# sequence parallelism it was:

# %%
print([round(rank["peak_memory_bytes"] / 2**20, 1) for rank in split.summary()["ranks"]])

# %%
my_guess = guess("peak_mb", ...)
sequence_split = run(spec, options={"sequence_parallel": True}).wait()
for name, job in {"tensor parallel": split, "with sequence": sequence_split}.items():
    sent = sum(entry.theory for entry in job.ledger()) / 2**20
    owners = job.state.ranks[0].memory_step.at_peak
    activations = owners["activations"] / 2**20
    print(f"{name:15}  {sent:6.1f} MiB sent (expected)  {activations:6.1f} MiB of activations at the peak of a step")
my_guess

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# A reduce-scatter and an all-gather send as much as one all-reduce, so the expected traffic is almost the same.
# **Activations** become smaller: those between the split matrices are sharded. In large models these are a large
# fraction. Here they are small compared with attention and the wide part of the MLP, which were already split.
#
# The expected traffic is that of a ring. gloo, the backend of CPU ranks, implements a reduce-scatter as an all-reduce
# of everything, so there it sends *more*, and `sequence_split.ledger()` says how much. NCCL has a native
# reduce-scatter.
#
# </details>

# %% [markdown]
# ## Exercise: split it yourself
#
# Write `parts(a, b, rank, ranks)`. It returns rank `rank`'s shard of `a` and its shard of `b`, so that the sum of
# `relu(x @ a_shard) @ b_shard` over all ranks is `relu(x @ a) @ b`. It must work for any number of ranks that divides
# the inner width.


# %% tags=["exercise"]
def parts(a, b, rank, ranks): ...


check("tensor_parallel.parts", parts)

# %% [markdown]
# ## Exercise: do not gather the logits
#
# The largest single message of the run above is the all-gather of the logits: 256 numbers per position. Train the same
# GPT with `tp` on two ranks for at least 5 steps without this all-gather. `Lab(strategy="tp", workload="gpt")` shows
# the options.

# %% tags=["exercise"]
not_gathered = ...  # run("tp", workload="gpt", **HERE, steps=5, samples=80, …).wait()
check("tensor_parallel.logits", not_gathered)
