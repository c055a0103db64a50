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
# # Metrics over all ranks, without counting a sample twice
#
# `DistributedSampler` gives all ranks the same number of samples. If the data set cannot be divided evenly, it repeats
# some. In training that hardly matters. In evaluation it is wrong: repeated samples count twice, and the mean of the
# ranks' means is not the mean over the samples.
#
# For an exact metric, give each rank every n-th sample, without repetition, and add up **sums and counts**, not means.
# The ranks then differ by at most one sample. Without collectives in the forward pass (a single device's model, or
# DDP's `model.module`) that is fine; with FSDP, all ranks must run the same number of forward passes.

# %%
# %load_ext labkit

# %%
# %%torchrun 4
from torch.utils.data import DistributedSampler

torch.manual_seed(0)
correct = (torch.rand(10) < 0.7).float()  # of ten samples, equal on all ranks

padded = correct[list(DistributedSampler(range(10), shuffle=False))]
mean = padded.mean().to(device)
dist.all_reduce(mean)

own = correct[rank::world_size]
sums = torch.tensor([own.sum(), len(own)], device=device)
dist.all_reduce(sums)

report(
    samples_of_sampler=len(padded),
    mean_of_means=round(mean.item() / world_size, 4),
    exact=round((sums[0] / sums[1]).item(), 4),
    expected=round(correct.mean().item(), 4),
)

# %% [markdown]
# The same holds for a loss (sum and count), for perplexity (exponentiate after the reduction), and for a confusion
# matrix (add the matrices). Metrics that are not sums, such as the area under the ROC curve, need all predictions:
# `dist.all_gather_object`, or `torchmetrics`, which gathers for you.
