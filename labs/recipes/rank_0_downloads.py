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
# # Download once per machine, then read on every rank
#
# If every rank downloads, they write the same file at the same time. If only rank 0 does, the ranks of other machines
# find nothing. So **local rank 0** of each machine downloads, and the others wait.
#
# Rules:
#
# - `LOCAL_RANK` counts the ranks of one machine, `RANK` those of the job. On a shared file system use `RANK`.
# - Write to a temporary name and rename: a process that is killed half-way leaves no file that looks complete.
# - The barrier is a collective, so **all** ranks must call it, and it fails after the timeout of the process group (10
#   minutes with NCCL, 30 with gloo). For a longer download, prepare the data in a separate job.

# %%
# %load_ext labkit

# %%
# %%torchrun 2
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir


@contextmanager
def local_rank_0_first():
    """Local rank 0 runs the block first, then the other ranks of its machine do."""
    first = int(os.environ["LOCAL_RANK"]) == 0
    if not first:
        dist.barrier()
    yield first
    if first:
        dist.barrier()


def download(path):
    """Stands for a download: writes a file, atomically."""
    if path.exists():
        return "found"
    unfinished = path.with_suffix(f".{os.getpid()}")
    torch.save(torch.arange(1000), unfinished)
    unfinished.replace(path)
    return "downloaded"


path = Path(gettempdir()) / f"labkit-recipe-{os.getppid()}.pt"
with local_rank_0_first():
    how = download(path)
report(how=how, samples=len(torch.load(path, weights_only=True)))
dist.barrier()
if rank == 0:
    path.unlink()

# %% [markdown]
# If the block of local rank 0 raises an exception, the other ranks wait in the barrier until torchrun, which sees the
# failed process, terminates them.
