"""Checks of the machine: connections, ports, users, memory, disk, and what helps a run to start."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import tempfile
from pathlib import Path

import psutil

from labkit.common.units import size
from labkit.frontends.doctor.check import Check, version_of
from labkit.launch.warm.client import Cold, about
from labkit.prediction.link_table import CALIBRATE, stored, summary
from labkit.record.folder import runs_root
from labkit.setup.config import ConfigError
from labkit.setup.limits import in_force
from labkit.setup.machine import Machine

_GIB = 1 << 30


def loopback() -> Check:
    """Whether processes of this machine can connect to each other."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5) as client,
        ):
            server.settimeout(5)
            accepted, _ = server.accept()
            with accepted:
                client.sendall(b"x")
                accepted.recv(1)
    except OSError as error:
        fix = "bring the interface lo up, or ask the administrator of this container"
        return Check("loopback", "broken", f"cannot connect to 127.0.0.1: {error}", fix)
    return Check("loopback", "fine", "127.0.0.1 accepts connections")


def ports() -> Check:
    """Whether the usual ports 8888 and 29500 are free; the lab requires neither."""
    taken = [port for port in (8888, 29500) if not _is_free(port)]
    if 8888 in taken:
        says = f"{' and '.join(map(str, taken))} in use: JupyterLab uses the next free port, and runs use neither"
        return Check("ports", "fine", says)
    other = "in use" if taken else "free"
    return Check("ports", "fine", f"8888 (JupyterLab) is free; 29500 is {other}, but runs do not use it")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        if os.name != "nt":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def other_users() -> Check:
    """Whether other users are active: every local user can connect to the ranks' sockets on loopback."""
    if os.name == "nt":
        return Check("users", "fine", "not checked on Windows")
    own, others = os.geteuid(), set()
    for process in psutil.process_iter(["uids", "username"]):
        uids = process.info["uids"]
        if uids is not None and uids.real >= _FIRST_PERSON and uids.real != own and uids.real != _NOBODY:
            others.add(process.info["username"])
    if not others:
        says = "no other user is active; during a run every local user could connect to its ranks"
        return Check("users", "fine", says)
    names = ", ".join(sorted(others)[:3]) + (" and others" if len(others) > 3 else "")
    says = f"{names} also use this machine: torch's store and gloo accept connections of every local user on 127.0.0.1"
    fix = "if you do not trust them, train in your own network namespace or container (REFERENCE.md, Security)"
    return Check("users", "degraded", says, fix)


_FIRST_PERSON, _NOBODY = 1000, 65_534  # the first user id of people, and the id of the user "nobody"


def shared_memory() -> Check:
    """The size of /dev/shm, which nccl and data loader workers use."""
    path = Path("/dev/shm")
    if not path.is_dir():
        return Check("shm", "fine", "this system has no /dev/shm")
    total = shutil.disk_usage(path).total
    says = f"/dev/shm has {size(total, 2)}"
    if total < _GIB // 2 and len(Machine.here().gpus) > 1:
        says = f"{says}, which may be too small for nccl"
        return Check("shm", "degraded", says, "enlarge it (docker: --shm-size=1g)")
    return Check("shm", "fine", says)


def runs_folder() -> Check:
    """Whether runs can be written, and the free disk space."""
    root = runs_root()
    there = next(path for path in (root, *root.parents) if path.is_dir())
    fix = "set LABKIT_RUNS to another folder"
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        return Check("runs", "broken", f"cannot write to {there}: {error.strerror}", fix)
    free = shutil.disk_usage(there).free
    says = f"{root}, {size(free)} free"
    if free < _GIB // 4:
        return Check("runs", "broken", says, f"delete finished runs with labkit clean, or {fix}")
    return Check("runs", "degraded" if free < _GIB else "fine", says, fix if free < _GIB else "")


def limits() -> Check:
    """The limits of runs, with the file that each comes from, and the CPU slots of this machine."""
    try:
        found = in_force()
    except ConfigError as error:
        return Check("limits", "broken", str(error), "correct the file; no run starts until then")
    shown = {"hours": f"{found.hours} hours per run", "ranks": f"{found.ranks} ranks per run"}
    shown |= {"disk": f"{size(found.disk or 0)} for all runs", "cpu_slots": f"{found.slots} CPU slots"}
    says = [f"{shown[name]} ({source})" for name, source in found.sources.items()]
    if "cpu_slots" not in found.sources:
        says.append(f"{found.slots} CPU slots for the ranks of all users (default)")
    return Check("limits", "fine", ", ".join(says))


def digits() -> Check:
    """The built-in data sets."""
    if importlib.util.find_spec("sklearn") is None:
        says = "the digits data set needs scikit-learn, which is not installed"
        return Check("data", "degraded", says, "run python3 -m labkit setup")
    return Check(
        "data", "fine", f"digits from scikit-learn {version_of('scikit-learn')}; text from the standard library"
    )


def warm_start() -> Check:
    """The warm server, which starts runs from a notebook quickly."""
    found = about()
    if isinstance(found, Cold):
        says = found.reason or "no warm server is running; an open panel, %%torchrun and run() in a notebook start one"
        return Check(
            "warm start",
            "degraded" if found.reason else "fine",
            says,
            "runs start cold until a new server serves" if found.reason else "",
        )
    memory = size(psutil.Process(found["pid"]).memory_info().rss)
    return Check("warm start", "fine", f"process {found['pid']} ({memory}) has started {found['runs']} runs")


def communication() -> Check:
    """What was measured of the communication between ranks."""
    found = stored(Machine.here())
    if found.problems:
        return Check("links", "degraded", "; ".join(found.problems), f"run {CALIBRATE}")
    return Check("links", "fine", summary(found), "" if found.tables else f"run {CALIBRATE}")


def compiler() -> Check:
    """A C++ compiler, which the lab does not need."""
    path = shutil.which("g++")
    none = "no g++; the lab does not need it, but some third-party libraries compile extensions with it"
    return Check("compiler", "fine", path or none)
