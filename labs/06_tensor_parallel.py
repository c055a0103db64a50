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
# A layer of a large model has matrices that fill a GPU by themselves. Sharding (labs 04 and 05) only *keeps* them in parts, and puts them
# together to compute. **Can two ranks compute one matrix product, each with its part alone, and what must they tell each other?**
#
# In this lab you split a small network by hand, with numbers that you can check, and then look at a transformer that is split so.

# %%
import torch

from labkit import Spec, check, excerpt, pictures, place, run, show

HERE = place(2)  # two GPUs where there are as many, else two CPU ranks
# %load_ext labkit

# %% [markdown]
# ## Two ways to cut
#
# $$Y = \mathrm{relu}(X A)\, B$$
#
# is the perceptron in every transformer's layer. `X` has a sample in each row. These matrices are small enough for mental arithmetic:

# %%
X = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
A = torch.tensor([[1.0, 0.0, 2.0, -1.0], [2.0, 1.0, -1.0, 0.0]])
B = torch.tensor([[1.0, 0.0], [2.0, 1.0], [0.0, 3.0], [1.0, 1.0]])
H = torch.relu(X @ A)
Y = H @ B
print(Y)

# %% [markdown]
# **By columns.** A column of the product needs one column of `A`, and all of `X`. Blue is what rank 0 has, orange what rank 1 has,
# grey what both have.

# %%
pictures.tensor_parallel.column(X.tolist(), A.tolist())

# %% [markdown]
# **By rows.** If the ranks have columns of `H`, they need only the same *rows* of `B`. Each gets an addend of the whole product.

# %%
pictures.tensor_parallel.row(H.tolist(), B.tolist())

# %% [markdown]
# **Predict:** for both products together, how often must the ranks talk: if `A` is cut by columns and `B` by rows? If `A` is cut by
# rows and `B` by columns?
#
# <details class="answer"><summary>Answer</summary>
#
# Columns, then rows: **once**, at the end. What a rank gets from the first product is just what it needs for the second, and relu,
# which looks at each number by itself, can stand between.
#
# Rows, then columns: **twice**. After the first product each rank has addends, and relu of an addend is not an addend of relu: they
# must be added up *before* it. At the end each rank has some columns of `Y`, and the next layer needs all.
#
# </details>

# %%
pictures.tensor_parallel.pair(X.tolist(), A.tolist(), B.tolist())

# %% [markdown]
# The same in torch. Compare the sum with `Y` above:

# %%
addends = [torch.relu(X @ A[:, :2]) @ B[:2], torch.relu(X @ A[:, 2:]) @ B[2:]]
print(*addends, addends[0] + addends[1], sep="\n\n")
torch.equal(addends[0] + addends[1], Y)

# %% [markdown]
# And the wrong way round, without the all-reduce in the middle: is it still `Y`?

# %%
addends = [torch.relu(X[:, :1] @ A[:1]) @ B, torch.relu(X[:, 1:] @ A[1:]) @ B]
addends[0] + addends[1]

# %% [markdown]
# ## Why all ranks have the same input
#
# In data parallel training each rank has samples of its own. Here every rank must have the *same* `X`.
#
# **Predict:** what happens if each rank feeds a batch of its own? Is there an error?

# %%
# %%torchrun 2
torch.manual_seed(0)  # the same matrices on both ranks
x, a, b = torch.randn(4, 8), torch.randn(8, 16), torch.randn(16, 8)
a_mine, b_mine = a.chunk(2, dim=1)[rank], b.chunk(2, dim=0)[rank]
torch.manual_seed(rank)
for name, mine in {"same_input": x, "own_input": torch.randn(4, 8)}.items():
    y = (torch.relu(mine @ a_mine) @ b_mine).to(device)
    dist.all_reduce(y)
    wrong_by = (y.cpu() - torch.relu(mine @ a) @ b).abs().max()
    report(**{name: f"{wrong_by:.5f}"})

# %% [markdown]
# <details class="answer"><summary>What the table says</summary>
#
# With the same input the sum is right, but for rounding. With inputs of their own the ranks add up a part of *one* sample's result
# and a part of *another's*. The shapes fit, so that nothing fails: the model only learns nothing. The lab looks for this: a run in
# which ranks that share a layer have different losses gets the finding `loss_differs`.
#
# </details>
#
# So tensor parallel ranks count as **one** for the batch, however many there are:

# %%
for strategy in ("ddp", "tp"):
    print(f"{strategy:4}", Spec(strategy=strategy, workload="gpt", nproc=2).batch_sentence)

# %% [markdown]
# ## A transformer
#
# Its layer has two such pairs: query, key and value by columns, so that each rank has some **heads**, and the matrix that merges the
# heads by rows; then the perceptron. Norms and additions need whole vectors: every rank has and does them all.

# %%
pictures.tensor_parallel.layer()

# %% [markdown]
# In the script this is a table from layers to styles, and one call of `parallelize_module` for each block:

# %%
spec = Spec(strategy="tp", workload="gpt", **HERE, steps=12, samples=200)
print(excerpt(spec, "tensor_plans"), excerpt(spec, "parallelize"), sep="\n\n")

# %% [markdown]
# **Predict** before you run. This GPT has 5 layers of width 128, and a step takes 16 windows of 128 places, in numbers of 4 bytes.
#
# 1. How many all-reduces does a step need, forward and backward? (In backward the columns' input gets its gradient from both ranks.)
# 2. How many bytes does one of them add up?
# 3. What does each of two ranks hold of all parameters: half, or more?

# %%
layers, width, places, batch = 5, 128, 128, 16
vectors = 4 * batch * places * width  # bytes of one activation
calls = 4 * layers + 1  # two in each direction of a layer, and one behind the head
ring = 2 * (2 - 1) / 2  # an all-reduce on n ranks sends 2(n−1)/n of its bytes
print(f"{calls} all-reduces of {vectors / 2**20:.0f} MiB: {2 * ring * calls * vectors / 2**20:.0f} MiB sent by both ranks")

# %%
split = run(spec)
show(split)

# %%
split.wait().ledger()

# %% [markdown]
# <details class="answer"><summary>Why were there more?</summary>
#
# Look at the reason in the ledger. Query, key and value are three matrices with the same input. Each adds up its own gradient, where
# one sum would do: two more all-reduces in a layer. And the logits, of which each rank has those of some bytes, are gathered.
#
# </details>
#
# Who has how much? Only matrices in the plan are split; embeddings, norms and some biases are whole on every rank.

# %%
whole = spec.workload_row.parameters(spec.options)
for each in split.summary()["ranks"]:
    held = each["memory_bytes"]["parameters"] / 4
    print(f"rank {each['rank']}: {held:,.0f} of {whole:,} parameters, {held / whole:.0%}")

# %% [markdown]
# Now where the time goes. Every all-reduce is **waited for**: the next matrix needs its result. DDP hides its all-reduces behind
# backward; here there is little to hide them behind. Therefore tensor parallelism stays where the wire is fast: inside one machine.

# %%
split.figure("timeline")

# %% [markdown]
# ## Sequence parallelism
#
# Between the split matrices every rank holds the *same* activations and computes the *same* norms. Sequence parallelism (Korthikanti
# et al. 2022) lets each rank have only some **places** there. An all-reduce is a reduce-scatter and an all-gather: take them apart,
# and put the norm in between.

# %%
pictures.tensor_parallel.layer(sequence_parallel=True)

# %% [markdown]
# **Predict:** does it send more or less? What becomes smaller?

# %%
places_split = run(spec, options={"sequence_parallel": True}).wait()
for name, job in {"whole between": split, "places split": places_split}.items():
    sent = sum(entry.theory for entry in job.ledger()) / 2**20
    owners = job.state.ranks[0].memory_step["at_peak"]
    print(f"{name:14}  {sent:6.1f} MiB sent by theory  {owners['activations'] / 2**20:6.1f} MiB of activations at the peak of a step")

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# A reduce-scatter and an all-gather send what one all-reduce sends, so by theory a step sends nearly the same. **Activations** become
# smaller: those between the split matrices are shared out. In large models they are many. Here they are few beside attention and the
# wide part of the perceptron, which were split before.
#
# The theory is that of a ring. gloo, which carries the messages of CPU ranks, does a reduce-scatter as an all-reduce of everything; so
# there it sends *more*, and `places_split.ledger()` says by how much. NCCL does it as it should.
#
# </details>

# %% [markdown]
# ## Exercise: cut it yourself
#
# Write `parts(a, b, rank, ranks)`: it gives rank number `rank` its part of `a` and its part of `b`, so that the sum over all ranks of
# `relu(x @ a_part) @ b_part` is `relu(x @ a) @ b`. It must work for any number of ranks that divides the inner width.


# %% tags=["exercise"]
def parts(a, b, rank, ranks): ...


check("tensor_parallel.parts", parts)

# %% [markdown]
# ## Exercise: logits that nobody gathers
#
# The largest single message of the run above gathers the logits: 256 numbers for every place. Train the same GPT with `tp` on two
# ranks for at least 5 steps, so that they are *not* gathered. `Lab(strategy="tp", workload="gpt")` shows what options there are.

# %% tags=["exercise"]
not_gathered = ...  # run("tp", workload="gpt", **HERE, steps=5, samples=200, …).wait()
check("tensor_parallel.logits", not_gathered)
