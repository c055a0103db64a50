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
# # Batch size: when more ranks stop helping
#
# You train on 8 GPUs with 32 samples each, and get 64 GPUs. With data parallelism the global batch grows from 256 to
# 2,048. **Is the training eight times as fast? Which number decides it, and can you measure it before you ask for
# 512?**
#
# A step with more samples has a less noisy gradient. That is worth a longer step, up to a point: the *critical batch*.
# In this lab two ranks measure the noise of their gradients, nearly for free, and then the steps and samples that every
# batch needs. You see how the learning rate has to follow, and decide how many ranks pay off. The cells compute for
# about 1 minute on two cores.

# %%
from labkit import check, guess, pictures

# %load_ext labkit

# %% [markdown]
# ## A model, many times
#
# Two ranks **stay** for the whole lab ([lab 03](03_ddp.py)). They train an MLP with one hidden layer on the 8×8 digits
# of scikit-learn. A step is so short that the cell stores *several* models as rows of one tensor, and trains them
# side by side: with other initial weights or learning rates, and on the same samples.

# %%
# %%torchrun 2 --keep
torch.set_num_threads(1)
from sklearn.datasets import load_digits

pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
images, labels = pixels[:1436].float() / 16, labels[:1436]
SIZES = (64 * 32, 32, 32 * 10, 10)  # weights and biases of two layers, with 32 hidden units


def losses(weights, images, labels):
    first, bias, second, last = weights.split(SIZES, dim=1)
    hidden = (images @ first.view(-1, 64, 32) + bias[:, None]).relu()
    logits = hidden @ second.view(-1, 32, 10) + last[:, None]  # (models, samples, classes)
    wanted = labels.expand(len(weights), -1)
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), wanted, reduction="none").mean(1)


# %%
# %%ranks
def gradients(weights, samples):
    weights = weights.detach().requires_grad_()
    loss = losses(weights, images[samples], labels[samples]).sum()  # a model has no effect on the others
    return torch.autograd.grad(loss, weights)[0]


def initial(seed):
    torch.manual_seed(seed)
    scales = (1 / 8, 0, 1 / 32**0.5, 0)
    return torch.cat([scale * torch.randn(1, size) for scale, size in zip(scales, SIZES)], dim=1)


# %% [markdown]
# ## What a gradient consists of
#
# The gradient *g* of a batch of *B* random samples is the gradient *G* of all samples, plus noise. One sample has noise
# with the covariance Σ. Its trace, tr Σ, is the mean squared length of the noise, and the mean over *B* samples has
# *B* times less of it. Signal and noise are independent, so on average
#
# $$|g|^2 = |G|^2 + \frac{\operatorname{tr} \Sigma}{B}$$
#
# **Predict:** how does |g|² change from a batch of 1 to 256? The cell measures it for one set of weights: the mean over
# 150 draws per rank.

# %%
# %%ranks
weights, pairs = initial(0), []
torch.manual_seed(rank)
for batch in (1, 4, 16, 64, 256):
    squares = torch.zeros(1)
    for _ in range(150):
        squares += gradients(weights, torch.randint(len(labels), (batch,))).square().sum() / 150
    dist.all_reduce(squares)
    pairs.append((batch, squares.item() / world_size))

# %%
# %ranks pull pairs 0
pictures.batch_size.norms(pairs)

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# Small batches are nearly pure noise: |g|² falls as 1 / B. Large ones are nearly pure signal: |g|² stays, and more
# samples change nothing. Where both parts are equal is the **gradient noise scale**, tr Σ / |G|², a number of samples
# (McCandlish et al. 2018, *An Empirical Model of Large-Batch Training*, where it is called *B* simple).
#
# </details>
#
# ## Ranks measure it for free
#
# Two equations are enough for two unknowns, and data parallelism has both. Before its all-reduce, a rank has the
# gradient of *its* samples. Afterwards it has the mean over *all* samples. Both norms are nearly free: the squared norm
# of the local gradient is one more number in the same all-reduce (McCandlish et al. 2018, appendix A.1).
#
# In the function below, find the two norms. `rates` has several learning rates, each for three models. Training ends
# when the first rate has a loss of 0.3 in the mean of its models: that is the best of the rates for this batch.


# %%
# %%ranks
def train(batch, rates, warmup=1, most=1000, update=lambda gradient, step: gradient):
    """Step at which the first of the rates arrives, that rate, and both squared norms of each step."""
    torch.manual_seed(rank)  # of the samples; the weights are equal on all ranks
    draws = torch.Generator().manual_seed(100 + rank)
    weights = torch.cat([initial(seed) for seed in range(3)] * len(rates))
    rate, norms = torch.tensor(rates).repeat_interleave(3)[:, None], []
    for step in range(1, most + 1):
        local = gradients(weights, torch.randint(len(labels), (batch // world_size,), generator=draws))
        loss = losses(weights, images[rank:256:world_size], labels[rank:256:world_size])
        numbers = torch.cat([local, local.square().sum(1, keepdim=True), loss[:, None]], dim=1)
        dist.all_reduce(numbers)  # the gradients, and two numbers per model
        mean, small, loss = (numbers / world_size).split((local.shape[1], 1, 1), dim=1)
        norms.append((small.view(-1, 3).mean(1), mean.square().sum(1).view(-1, 3).mean(1)))
        loss = loss.view(-1, 3).mean(1)
        if loss.min() < 0.3:
            best = int(loss.argmin())
            return step, rates[best], [(low[best].item(), high[best].item()) for low, high in norms]
        weights -= rate * min(1, step / warmup) * update(mean, step)
    return None, None, []


# %% [markdown]
# The next cell trains with 32 samples per rank and a well-chosen learning rate. **Predict:** does the noise scale rise
# or fall while the model learns?

# %%
# %%ranks
steps, rate, norms = train(64, [0.7])

# %%
# %ranks pull norms 0
small, large = zip(*norms)
pictures.batch_size.noise(small, large, batch=32, ranks=2)

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# It begins near 50, because the gradient is small at random weights, falls to about 10, and rises to 20 near the end:
# *G* becomes smaller, but samples still disagree about where to go. In the paper it rises during training as well, and
# a batch that grows with it saves samples.
#
# A noisy estimate: |G|² is a difference of two noisy numbers, and may be negative in a step. So both are averaged over
# steps first, and divided afterwards.
#
# </details>
#
# ## Exercise: the noise scale from the gradients of ranks
#
# Write `noise_scale(steps)`. `steps` is a list. Each element is a step: a list with a pair per rank, of its number of
# samples and the gradient of their mean loss, a tensor. Ranks have **different** numbers of samples, as with GPUs of
# different speed. The function returns tr Σ / |G|², where both are means over the steps. *G* changes from step to step.
#
# The check draws gradients whose noise scale it knows. **Predict** what happens if you divide in each step, and average
# these ratios.


# %% tags=["exercise"]
def noise_scale(steps): ...


check("batch_size.noise", noise_scale)

# %% [markdown]
# ## Steps and samples to the same loss
#
# Now the question itself. For each global batch, the cell trains with seven learning rates and counts the steps until
# the best one has a loss of 0.3. **Predict:** batch 2 needs about 400 steps. How many does 8 need, and how many 512?

# %%
with_8, with_512 = guess("steps", ...), guess("steps", ...)

# %%
# %%ranks
RATES = [2 ** (exponent / 2) for exponent in range(-6, 1)]
pairs, best = [], []
for batch in (2, 4, 8, 16, 32, 64, 128, 512):
    steps, rate, norms = train(batch, RATES)
    pairs.append((batch, steps))
    best.append((batch, rate))
    if rank == 0:
        print(f"batch {batch:3}: {steps:4} steps, {batch * steps:6,} samples, best learning rate {rate:.2f}")

# %%
# %ranks pull pairs 0
measured = dict(pairs)
print(with_8.compared_with(measured[8]))
print(with_512.compared_with(measured[512]))
pictures.batch_size.hyperbola(pairs)

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# There is a least number of steps that no batch beats, and a least number of samples. Between them lies a hyperbola.
# The **critical batch** is where a training takes twice the least of both. It is about 20 here, in the middle of the 10
# to 50 that the ranks have measured as noise scale, without any of these runs. The paper finds agreement within small
# factors for most tasks, not equality. Expect the same of your own model.
#
# Far below the critical batch, twice the ranks take half the steps: *perfect scaling*. Far above, they take the same
# steps, and compute twice the samples for nothing.
#
# </details>
#
# ## The learning rate has to follow
#
# Look at the last column above. For SGD, McCandlish et al. derive the best rate ε / (1 + noise scale / B): **linear**
# in *B* far below the critical batch (Goyal et al. 2017, *Accurate, Large Minibatch SGD*), and constant far above it.
# Adam divides a gradient by its own size, so that noise enters by its standard deviation: there the rule is the
# **square root** (Malladi et al. 2022, *On the SDEs and Scaling Rules for Adaptive Gradient Algorithms*).
#
# **Predict** by which factor Adam's best rate grows from batch 2 to 32, and compare it with SGD's above.


# %%
# %%ranks
def adam():
    moments = [0.0, 0.0]

    def update(gradient, step):
        moments[0] = 0.9 * moments[0] + 0.1 * gradient
        moments[1] = 0.999 * moments[1] + 0.001 * gradient.square()
        return moments[0] / (1 - 0.9**step) / ((moments[1] / (1 - 0.999**step)).sqrt() + 1e-8)

    return update


# %%
# %%ranks
for batch in (2, 8, 32):
    steps, rate, norms = train(batch, [rate / 2**3.5 for rate in RATES], update=adam())
    if rank == 0:
        print(f"Adam, batch {batch:2}: {steps:4} steps, best learning rate {rate:.4f}")

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# From batch 2 to 32 the square root gives a factor of 4. SGD's best rate grows twice as fast at first, and stops at the
# critical batch. Rates differ by √2 in the grid, and neighbours of the best one are nearly as good: look at the trend,
# not at one row. Adam also needs fewer steps here, so its critical batch is another one: it belongs to the optimizer,
# the model and the loss that you want, not to the data alone.
#
# </details>
#
# Two mistakes with SGD, from a good rate of batch 2, 1/8. **Predict** for both columns: what happens at batch 8, and at
# 32, if the learning rate stays as it is? And if it grows linearly with the batch?

# %%
# %%ranks
for batch in (8, 32):
    kept, linear = (train(batch, [rate], most=300)[0] for rate in (1 / 8, batch / 16))
    if rank == 0:
        print(f"batch {batch:2}: {kept} steps with 1/8; {linear} with {batch / 16:g}")

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# With the rate of batch 2, batch 32 needs hardly fewer steps than batch 8: the gradient is better, but nobody uses it
# to go further. This is a common reason why "scaling does not work". The linear rule saves steps at batch 8. Near the
# critical batch the rule ends: steps become so long that curvature decides, not noise, and training does not arrive
# (*None*: not within 300 steps).
#
# </details>
#
# **Warmup** raises the rate from almost 0 during the first steps. Goyal et al. needed it for ResNet-50 with 8,192
# samples, where the first steps are the dangerous ones. **Predict:** does it rescue a rate that is too large here?

# %%
# %%ranks
for rate in (1.0, 2.0):
    found = {warmup: train(128, [rate], warmup, most=100)[0] for warmup in (1, 20)}
    if rank == 0:
        print(f"learning rate {rate}: " + ", ".join(f"{steps} steps with warmup {key}" for key, steps in found.items()))

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# Not here. A rate that works costs a few steps more with warmup, and one that is too large fails later. Warmup helps
# if curvature is largest at the start and falls, as in deep networks; this model has one hidden layer. Measure both on
# your own model before you conclude that a batch is too large.
#
# </details>
#
# ## Gradient accumulation is the same as a larger batch
#
# Without 64 GPUs you can have their batch: add up gradients of micro-batches, and update once. **Predict:** two ranks
# accumulate 4 micro-batches of 8 samples. How much does the gradient differ from one with 32 samples per rank, and what
# if one of the micro-batches has 2 samples instead of 8?

# %%
# %%ranks
weights, samples = initial(0), torch.arange(32) + 32 * rank


def difference(parts):
    mean = sum(gradients(weights, part) for part in parts) / len(parts)
    both = torch.cat([mean, gradients(weights, torch.cat(parts))])
    dist.all_reduce(both)
    return ((both[0] - both[1]).norm() / both[1].norm()).item()


report(equal=f"{difference(samples.split(8)):.1e}", shorter=f"{difference(samples[:26].split(8)):.1e}")

# %%
# %ranks stop

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# Equal micro-batches: only rounding differs, so noise scale, best rate and steps are those of the larger batch. A
# shorter micro-batch gets too much weight in a mean of means: weigh with the number of samples (or tokens). What
# accumulation does not change is the time: micro-batches run one after the other, but all-reduce and update happen
# once.
#
# </details>
#
# ## Seconds on a cluster
#
# Steps are measured; seconds depend on machines. The picture **models** them: each rank computes 2 samples in 100 ms,
# and all gradients take 20 ms over a link, which an all-reduce uses 2 (n − 1) / n times ([lab 01](01_collectives.py)),
# with nothing overlapped. Think of the samples as of sequences, with a model that is as noisy as this one. **Predict**
# with how many ranks the cost doubles.

# %%
pictures.batch_size.seconds(pairs, batch=2, compute=0.1, transfer=0.02)

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# With few ranks time falls, and cost grows slowly. At the critical batch, 10 ranks with 2 samples, the samples have
# nearly doubled, and waiting for the all-reduce adds a third. Beyond it, time hardly falls. Further ranks are better
# used for something else: tensor or pipeline parallelism makes a *step* shorter and leaves the batch as it is ([lab
# 08](08_combine.py)).
#
# </details>
#
# ## Exercise: how many ranks pay off?
#
# Write `most_ranks(pairs, batch, compute, transfer, limit)`. `pairs` are measured, with an error of about 1 %: a global
# batch, and the steps to the loss with its best learning rate. A rank computes `batch` samples per step in `compute`
# seconds, and an all-reduce among *n* ranks takes 2 (n − 1) / n · `transfer` seconds more. The *cost* of a training is
# the number of ranks times its seconds. Return the largest number of ranks, of at most 1,024, whose training costs at
# most `limit` times the cost with one rank.


# %% tags=["exercise"]
def most_ranks(pairs, batch, compute, transfer, limit): ...


check("batch_size.ranks", most_ranks)

# %% [markdown]
# ## Summary
#
# | global batch | twice the ranks | SGD's best rate | what to do with more ranks |
# | --- | --- | --- | --- |
# | far below the critical batch | half the steps, the same samples | linear in the batch | data parallelism |
# | near it | fewer steps, more samples | grows less and less | weigh time against cost |
# | far above it | the same steps, twice the samples | constant | split the model, or train another one |
#
# The noise scale costs one number in an all-reduce. Measure it on your ranks, at a good learning rate, and look again
# later: it grows while the loss falls.
