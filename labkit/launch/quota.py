"""The disk quota of the folder of runs: before a run starts, the oldest finished ones are removed until it fits."""

from __future__ import annotations

import os
from pathlib import Path

from labkit.common.units import size
from labkit.launch.starting import LaunchError
from labkit.record.folder import RunFolder, runs_root
from labkit.record.status import is_over
from labkit.setup.limits import Limits


def keep_quota(limits: Limits, root: Path | None = None, needed: str | None = None) -> list[str]:
    """Removes the oldest finished runs under `root` until all runs take less than the quota, and returns their names.

    A run that is not over, that cannot be read, or that `needed` (a checkpoint) belongs to stays. Raises `LaunchError`
    if that leaves too much.
    """
    if limits.disk is None:
        return []
    root = root or runs_root()
    taken = {folder: _bytes(folder.path) for folder in RunFolder.all(root)}
    removed = []
    for folder in list(taken):
        if sum(taken.values()) < limits.disk:
            break
        kept = needed is not None and Path(needed).absolute().is_relative_to(folder.path)
        if not (kept or folder.trouble()) and is_over(folder):
            folder.delete()
            removed.append(folder.name)
            del taken[folder]
    if sum(taken.values()) >= limits.disk:
        raise LaunchError(
            f"the runs in {root} take {size(sum(taken.values()))}, and the quota is {size(limits.disk)}"
            f" ({limits.sources['disk']}); none of them may be removed: stop some, or delete files there"
        )
    return removed


def _bytes(path: Path) -> int:
    """Bytes that the files of a folder take on the disk; links are not followed."""
    total = 0
    for place, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_blocks * 512  # noqa: PTH118 many files
            except OSError:
                continue  # removed in the meantime
    return total
