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
# # Collectives: who sends what to whom
#
# **Four ranks have computed four gradients, and each needs the sum of all. Who sends what to whom, how long does it take, and what
# changes when there are eight?**
#
# A rank can do no more than *send* to one other and *receive* from one other. Everything here is made of that. You will see it as
# pictures, predict what it costs, run it on real processes, and write one yourself.

# %%
from labkit import check, pictures

# %load_ext labkit

# %% [markdown]
# ## A cell on four ranks
#
# `%%torchrun 4` starts the cell as four processes. The ranks have met already: `rank`, `world_size`, `device`, `torch`, `dist`
# (which is `torch.distributed`), `os` and `time` are there. `report` brings values back as a table. Where this machine has four GPUs
# each rank takes one, and NCCL carries the messages; else they are CPU ranks, and gloo does.
#
# **Predict:** every rank runs the same lines. What does each print, and in which order?

# %%
# %%torchrun 4
x = torch.full((3,), float(rank), device=device)
print("I am rank", rank, "of", world_size, "and have", x.tolist())
report(process=os.getpid(), device=str(device))

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# Each prints its own number, from a process of its own: look at the column *process*. There is no order between ranks. They only wait
# for each other where a message makes them.
#
# </details>
#
# *The script that every rank runs*, below the table, has the few lines that the magic wrote around the cell.

# %% [markdown]
# ## Broadcast: one has it, all need it
#
# DDP begins with it: rank 0's weights go to everybody. The simplest way is that rank 0 sends to one after another.
#
# In these pictures an arrow is a message, and the cell beside a rank is what it has **after** the round.

# %%
pictures.collectives.broadcast(4, by="one_by_one")

# %% [markdown]
# Three rounds for four ranks: n − 1, all of them rank 0's work. Or each passes it on to the next:

# %%
pictures.collectives.broadcast(4, by="chain")

# %% [markdown]
# Nobody is overworked now, but it is still n − 1 rounds.
#
# **Predict:** after one round *two* ranks have the message, and both can send. How few rounds are enough for 8 ranks? For 1024?

# %%
pictures.collectives.broadcast(8, by="tree")

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# Those who have it double in each round: 1, 2, 4, 8. So it takes log₂ n rounds, rounded up: 3 for 8 ranks, and 10 for 1024 in place
# of 1023.
#
# </details>
#
# ### From send and receive
#
# A chain in two lines. `recv` waits until the message is there.

# %%
# %%torchrun 4
x = torch.full((3,), float(rank + 1), device=device)
if rank > 0:
    dist.recv(x, src=rank - 1)
if rank < world_size - 1:
    dist.send(x, dst=rank + 1)
report(by_chain=x)
y = torch.full((3,), float(rank + 1), device=device)
dist.broadcast(y, src=0)
report(by_broadcast=y)

# %% [markdown]
# **Try it:** make it a tree. In round k = 1, 2, 4… the ranks below k send to rank + k.
# What happens if a rank waits for a message that nobody sends? Try that too: **Stop** ends it.

# %% [markdown]
# ## Reduce: a broadcast backwards
#
# Turn the arrows round and add on the way (`+`): the sum comes to rank 0. The digits in a cell are the ranks whose numbers are in it, and
# Σ is the sum of all.

# %%
pictures.collectives.reduce(4, by="tree")

# %% [markdown]
# ## All-reduce: everybody needs the sum
#
# This is what DDP does with gradients at every step. Three ways, from the obvious to the clever.
#
# **First way:** reduce to rank 0, then broadcast.

# %%
pictures.collectives.all_reduce(4, by="root")

# %% [markdown]
# **Second way:** the same, up and down a tree. Fewer rounds, but each still carries a whole message, and half of the ranks are idle.

# %%
pictures.collectives.all_reduce(4, by="tree")

# %% [markdown]
# **Third way:** cut the message into n pieces, A B C D, and send one of them at a time to the right neighbour. All ranks send all the time.
#
# **Predict** before you look: how many rounds does it take, and how much of its message does one rank send in all?

# %%
pictures.collectives.all_reduce(4, by="ring")

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# Two laps of n − 1 rounds: in the first the sums grow, and in the second the finished ones go round. That is 2 (n − 1) rounds of 1/n of the
# message: for four ranks 6 rounds and 1.5 messages, for any number of ranks less than 2.
#
# </details>

# %% [markdown]
# ## The other three
#
# **All-gather**: each has a piece, all need all of them. FSDP does it before it computes a layer.

# %%
pictures.collectives.all_gather(4)

# %% [markdown]
# **Reduce-scatter**: all have a whole message, and rank r needs piece r of the sum. FSDP does it with gradients.

# %%
pictures.collectives.reduce_scatter(4)

# %% [markdown]
# **All-to-all**: each has another piece for everybody. `2›0` goes from rank 2 to rank 0. A mixture of experts sends its tokens so.

# %%
pictures.collectives.all_to_all(4)

# %% [markdown]
# ## For real
#
# **Predict** the table, row by row: rank r begins with [r, r, r, r], and with [10r, 10r+1, 10r+2, 10r+3] for the all-to-all.

# %%
# %%torchrun 4
x = torch.full((4,), float(rank), device=device)
total, gathered = x.clone(), [torch.empty_like(x) for _ in range(4)]
part, swapped = torch.empty(1, device=device), torch.empty(4, device=device)

dist.all_reduce(total)
dist.all_gather(gathered, x)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its name since torch 2.13, and before
reduce_scatter(part, x)
dist.all_to_all_single(swapped, 10.0 * rank + torch.arange(4.0, device=device))
report(all_reduce=total, all_gather=torch.cat(gathered), reduce_scatter=part, all_to_all=swapped)

# %% [markdown]
# The all-to-all is a transposed table: row r of what was sent has become column r.

# %% [markdown]
# ## What it costs, by rule
#
# A message takes a time **α** to get going, however short it is, and a time **β** for every byte:
#
# > **T = rounds · α + bytes sent one after another · β**
#
# Short messages are all α, so that few rounds are best. Long ones are all β, so that few bytes are best. The picture counts both.

# %%
pictures.collectives.costs(8)

# %% [markdown]
# **Predict:** of the three all-reduces, which is best for one number? Which for a gradient of 100 MB?
#
# <details class="answer"><summary>Answer</summary>
#
# The tree has the fewest rounds, so it is best for one number. The ring sends the least, so it is best for 100 MB. Libraries
# choose by size.
#
# </details>

# %% [markdown]
# ## What it costs here
#
# Eight sizes, from 1 KiB to 16 MiB. The time of the slowest rank counts.


# %%
# %%torchrun 4 --as timed
def seconds(size, repeats=8):
    x = torch.zeros(size // 4, device=device)  # 4 bytes a number
    dist.all_reduce(x)  # the first one of a size is slower
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(x)
    x[0].item()  # a GPU works on by itself: wait for it
    return (time.perf_counter() - start) / repeats


sizes = [4**k * 1024 for k in range(8)]
seconds(sizes[0])  # the ranks get into step
report(sizes=sizes, seconds=[seconds(size) for size in sizes])

# %% [markdown]
# Two of the eight are enough to know α and β. The ring has 2 (n − 1) rounds, and 2 (n − 1) / n of the message goes out.

# %%
n, sizes = len(timed["sizes"]), timed["sizes"][0]
took = [max(ranks) for ranks in zip(*timed["seconds"])]
rounds, share = 2 * (n - 1), 2 * (n - 1) / n
alpha = took[0] / rounds
beta = (took[-1] - took[0]) / (share * (sizes[-1] - sizes[0]))
print(f"α = {1e6 * alpha:,.0f} µs a message    1/β = {1 / beta / 1e6:,.0f} MB/s")

# %% [markdown]
# **Predict:** by the model, from which size on does a message take twice as long as the shortest? Will the other six lie on the line?

# %%
model = [rounds * alpha + share * beta * size for size in sizes]
pictures.collectives.times(sizes, {"all-reduce": took}, {"all-reduce": model})

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# A flat part, where only α counts, and a rising part, where only β does. They meet near n α / β bytes: there bandwidth costs as much as
# latency.
#
# The line is through the first and the last point by construction; the others are the test. Where they miss it, the model is too simple:
#
# - **CPU ranks (gloo)** share cores. α is then mostly the time until the operating system lets the next rank run, and it jumps about. Up to
#   the size of a cache a byte is cheap, beyond it dear. No wire is involved at all: this is memory being copied.
# - **GPUs (NCCL)** choose another algorithm for short messages than for long ones, so the points may lie *below* the line in the middle.
#
# A gradient bucket of DDP has 25 MB by default. Which part of the picture is that in, and why?
#
# </details>
#
# **Try it** with two ranks: write `%%torchrun 2 --as timed`, and run the three cells again. What does the model say of α and β?

# %% [markdown]
# ### More ranks
#
# **Predict:** with 8 ranks in place of 4, what becomes of the time of the shortest message? And of the longest?

# %% tags=["long"]
# %%torchrun 8 --as eight
for size in (1024, 1024, 2**24):  # once more, to get into step
    x = torch.zeros(size // 4, device=device)
    dist.all_reduce(x)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(4):
        dist.all_reduce(x)
    x[0].item()
    report(**{f"bytes_{size}": (time.perf_counter() - start) / 4})

# %% tags=["long"]
for name, four, share_of_eight in (("bytes_1024", took[0], 14 / 6), ("bytes_16777216", took[-1], 1.75 / 1.5)):
    print(f"{name:15} 8 ranks / 4 ranks = {max(eight[name]) / four:4.1f}, by the model {share_of_eight:.1f}")

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# By the model the shortest takes 14 / 6 as long (rounds), and the longest 1.75 / 1.5 (bytes): for long messages a ring hardly notices
# how many ranks it has. That is so where every rank has a wire and a processor of its own. CPU ranks that share a few cores take turns:
# twice as many of them copy twice as much through the same memory, and a round ends only when the last rank has had its turn. There both
# grow by far more than the model says.
#
# </details>

# %% [markdown]
# ## Exercises
#
# **1.** Eight ranks all-reduce a gradient of 100 MB by a ring. How many MB does each rank send?

# %% tags=["exercise"]
megabytes = ...
check("collectives.bytes", megabytes)

# %% [markdown]
# **2.** The two laps of the ring are collectives of their own. Which two, in order? Write them as one text, with a comma between.

# %% tags=["exercise"]
two = ...
check("collectives.halves", two)

# %% [markdown]
# **3.** Write the ring. `pieces` is a list of `n` numbers, one for each piece; `send(to, number)` waits until rank `to` receives, as
# `dist.send` may; `receive(source)` waits until rank `source` sends. Return the list of the `n` sums. It is run by three and by
# four threads, and told where it goes wrong; a deadlock is found, too.


# %% tags=["exercise"]
def ring(pieces, rank, n, send, receive): ...


check("collectives.ring", ring)

# %% [markdown]
# ## What to take along
#
# | collective | rounds (ring or tree) | sent by a rank | who needs it |
# | --- | --- | --- | --- |
# | broadcast | ⌈log₂ n⌉ | up to ⌈log₂ n⌉ M | DDP, once at the start |
# | all-reduce | 2 (n − 1) | 2 (n − 1) / n · M | DDP and tensor parallelism, at every step |
# | all-gather | n − 1 | (n − 1) / n · M | FSDP, before each layer |
# | reduce-scatter | n − 1 | (n − 1) / n · M | FSDP and ZeRO, for gradients |
# | all-to-all | n − 1 | (n − 1) / n · M | mixtures of experts |
# | send, receive | 1 | M | pipelines, from stage to stage |
#
# A collective ends when **every** rank has come to it. One rank that is late, or that takes another way, is waited for by all.
