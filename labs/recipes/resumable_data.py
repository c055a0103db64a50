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
# # Resume in the middle of an epoch
#
# After a restart, the training should continue with the next sample: not with the first one, and with no sample twice.
# With a map-style data set and `DistributedSampler`, two numbers are enough: the epoch, which determines the order, and
# the batches that are done. Skip those **in the sampler**, so that skipped samples are not loaded.
#
# For data sets that are streams, or loaders with workers and random augmentation, `torchdata.stateful_dataloader` has a
# loader with `state_dict()`; every rank must save its own.

# %%
# %load_ext labkit

# %%
# %%torchrun 2
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ResumableSampler(DistributedSampler):
    """Skips the first `done` samples of this rank in the next epoch that is iterated."""

    done = 0

    def __iter__(self):
        skipped, self.done = self.done, 0
        return iter(list(super().__iter__())[skipped:])


BATCH = 4
dataset = TensorDataset(torch.arange(40))
sampler = ResumableSampler(dataset, seed=0)
loader = DataLoader(dataset, BATCH, sampler=sampler)

sampler.set_epoch(3)
whole = [batch.tolist() for (batch,) in loader]

state = {"epoch": 3, "batches": 2}  # what a checkpoint contains; equal on all ranks
sampler.set_epoch(state["epoch"])
sampler.done = state["batches"] * BATCH
rest = [batch.tolist() for (batch,) in loader]
report(batches=len(whole), after_resuming=len(rest), same_samples=rest == whole[state["batches"] :])

# %% [markdown]
# If you resume with another number of ranks, count **samples of the job**, not batches of a rank: `batches × BATCH ×
# world_size`. The order of the epoch is the same for any number of ranks; only its distribution changes.
