"""Counts the processes of this control group that the kernel's out-of-memory killer has killed (Linux)."""

from __future__ import annotations

from pathlib import Path

_CGROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def out_of_memory_kills(cgroups: Path = _CGROUPS, mount: Path = _MOUNT) -> int | None:
    """The count since the control group was created; None if it is unavailable. Ranks are in the group of their
    supervisor.

    Version 2 has it in `memory.events`, version 1 in `memory.oom_control`. In a container the group is the root of the
    mount.
    """
    try:
        lines = [line.split(":", 2) for line in cgroups.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return None
    groups = {controllers: path.lstrip("/") for _, controllers, path in (line for line in lines if len(line) == 3)}
    first = next((path for controllers, path in groups.items() if "memory" in controllers.split(",")), None)
    places = (
        [mount / "memory" / first / "memory.oom_control", mount / "memory" / "memory.oom_control"]
        if first is not None
        else []
    )
    second = groups.get("")
    for base in (mount, mount / "unified") if second is not None else ():
        places += [base / second / "memory.events", base / "memory.events"]
    return next((count for count in map(_count, places) if count is not None), None)


def _count(path: Path) -> int | None:
    try:
        fields = dict(line.split() for line in path.read_text(encoding="ascii").splitlines())
        return int(fields["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None
