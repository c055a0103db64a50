"""A job as one zip: what it contains. `common/zips.py` unpacks it."""

from __future__ import annotations

import io
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path

from labkit.common.files import MARK, write_output
from labkit.common.units import counted
from labkit.jobs.job_files import Profile, commands, sbatch, skypilot, trainjob
from labkit.jobs.portable import REQUIREMENTS, Portable
from labkit.record.folder import RunFolder
from labkit.record.packed import recording

_DATE = (1980, 1, 1, 0, 0, 0)  # of all files: the same job is the same zip


def contents(job: Portable, profile: Profile) -> dict[str, str]:
    """The files of a job by path, with those that start it on torchrun, Slurm, Kubeflow and SkyPilot."""
    return {
        "README.md": _readme(job),
        **job.all_files,
        "torchrun.txt": "".join(f"{line}\n" for line in commands(job)),
        "job.sbatch": sbatch(job, profile),
        "trainjob.yaml": trainjob(job, profile),
        "skypilot.yaml": skypilot(job, profile),
    }


def pack(job: Portable, profile: Profile, path: Path, run: RunFolder | None = None) -> Path:
    """Writes a job as a zip, with the recording of the `run` that it was; or replaces one that was packed before.
    Raises `OSError` if it cannot be written."""
    files: dict[str, str | bytes] = {**contents(job, profile)}
    if run is not None:
        files |= recording(run)
    write_output(path, zipped(files), private=True)
    return path


def zipped(files: Mapping[str, str | bytes]) -> bytes:
    """A zip of files by path; the same files are the same bytes."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.comment = MARK.encode()
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, _DATE)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, (stat.S_IFREG | 0o644) << 16
            archive.writestr(entry, data)
    return packed.getvalue()


def _readme(job: Portable) -> str:
    nodes = "one machine" if job.nodes == 1 else f"{job.nodes} nodes"
    elsewhere = "" if job.nodes == 1 else " Replace HOST by the address of the first node, which the others must reach."
    return f"""# {job.name}

A PyTorch training job: {counted(job.ranks, "rank")} on {nodes}, started by torchrun.

1. Install torch for your GPUs (pytorch.org), then `pip install -r {REQUIREMENTS}`: the versions it was packed with.
2. Run the commands of `torchrun.txt`, one per node, in this folder.{elsewhere}
3. Slurm: `sbatch job.sbatch`, after filling in partition and account of your site.
4. Kubeflow Trainer: `kubectl create -f trainjob.yaml`. SkyPilot: `sky launch skypilot.yaml`.

It runs on GPUs if there are any; with `CUDA_VISIBLE_DEVICES=` in front of torchrun it runs on CPU cores.
"""
