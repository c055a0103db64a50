"""`labkit doctor`: checks what this machine supports, line by line, and how to fix what is missing. Each check is one
small function of CHECKS. torch is probed in separate processes, so that a crash or hang does no harm."""

from __future__ import annotations

import importlib.util
import json as jsonlib
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from rich.console import Group
from rich.table import Table
from rich.text import Text

from labkit.common.units import size
from labkit.frontends.console import Console
from labkit.launch.warm.client import Cold, about
from labkit.prediction.links import CALIBRATE, LinkTable, stored, tables_in_words
from labkit.record.folder import runs_root
from labkit.setup import preflight
from labkit.setup.environment import active, how_to_add, release, requirements
from labkit.setup.limits import ConfigError, in_force
from labkit.setup.machine import Gpu, Machine

# ---- one line of the doctor's report

REINSTALL = "let the lab create its own environment: deactivate this one, then run python3 -m labkit setup"


@dataclass(frozen=True)
class Check:
    """One line: `level` is fine, degraded or broken, `says` is the result, `fix` the fix (empty if all is fine)."""

    name: str
    level: str
    says: str
    fix: str = ""


def version_of(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# ---- the measured times of collectives


def figures(table: LinkTable) -> dict[str, Any]:
    """The stored table as plain values, with `latency_seconds` and `bus_bytes_per_second` of each operation."""
    return table.to_json() | {
        "latency_seconds": {operation: table.latency(operation) for operation in table.points},
        "bus_bytes_per_second": {operation: table.bus_bandwidth(operation) for operation in table.points},
    }


def as_table(table: LinkTable) -> Group:
    """A title, and one row per operation; reasons for those that could not be measured."""
    drawn = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name, justify in (("operation", "left"), ("latency", "right"), ("bus bandwidth", "right")):
        drawn.add_column(name, justify=justify)
    for operation, points in table.points.items():
        latency = f"{table.latency(operation) * 1e6:,.0f} µs ({size(points[0].size)})"
        drawn.add_row(operation, latency, f"{table.bus_bandwidth(operation) / 1e9:,.2f} GB/s ({size(points[-1].size)})")
    for operation, reason in table.missing.items():
        drawn.add_row(operation, reason)
    for precision, flops in table.peaks.items():
        drawn.add_row(f"matrix products, {precision}", "", f"{flops / 1e9:,.1f} GFLOP/s per rank")
    if table.kernels:
        launch, copies = table.kernels["launch"], table.kernels["copies"]
        drawn.add_row("copies in memory", f"{launch * 1e6:,.1f} µs per operation", f"{copies / 1e9:,.1f} GB/s per rank")
    return Group(Text(f"\nCommunication of {table.title}", style="bold"), drawn)


# ---- checks of the machine

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
    fix = "if you do not trust them, train in your own network namespace or container (labkit/reference/security.md)"
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
    says = f"digits from scikit-learn {version_of('scikit-learn')}; text from the standard library"
    return Check("data", "fine", says)


def warm_start() -> Check:
    """The warm server, which starts runs from a notebook quickly."""
    found = about()
    if isinstance(found, Cold) and found.reason:
        return Check("warm start", "degraded", found.reason, "runs start cold until a new server serves")
    if isinstance(found, Cold):
        says = "no warm server is running; an open panel, %%torchrun and run() in a notebook start one"
        return Check("warm start", "fine", says)
    memory = size(psutil.Process(found["pid"]).memory_info().rss)
    return Check("warm start", "fine", f"process {found['pid']} ({memory}) has started {found['runs']} runs")


def communication() -> Check:
    """What was measured of the communication between ranks."""
    found = stored(Machine.here())
    if found.problems:
        return Check("links", "degraded", "; ".join(found.problems), f"run {CALIBRATE}")
    return Check("links", "fine", tables_in_words(found), "" if found.tables else f"run {CALIBRATE}")


def compiler() -> Check:
    """A C++ compiler, which the lab does not need."""
    path = shutil.which("g++")
    none = "no g++; the lab does not need it, but some third-party libraries compile extensions with it"
    return Check("compiler", "fine", path or none)


# ---- checks of the software


def python() -> Check:
    """The location of Python, and the required packages that are missing or of a version that does not work."""
    where = active() or f"Python at {sys.prefix}"
    says = f"{sys.version.split()[0]}, {where}"
    lacking = [package for package in requirements() if not package.met]
    if lacking:
        here = ", ".join(f"{package} (here: {package.installed or 'none'})" for package in lacking)
        return Check("python", "degraded", f"{says}; missing {here}", REINSTALL)
    return Check("python", "fine", says)


def torch() -> Check:
    """Whether torch can be imported, and its build."""
    found = preflight.torch()
    if found.error:
        return Check("torch", "broken", f"cannot be imported: {found.error}", REINSTALL)
    build = f"CUDA {found.cuda} build" if found.cuda else "CPU build"
    says = f"{found.version}, {build}"
    if release(found.version) < (2, 6):
        return Check("torch", "broken", f"{says}; the lab needs 2.6 or newer", REINSTALL)
    return Check("torch", "fine", says)


def devices() -> Check:
    """The GPUs, and whether this build of torch supports them."""
    machine, found = Machine.here(), preflight.torch()
    if not machine.gpus:
        why = machine.unused_cuda or f"{machine.no_gpu_reason}: CPU ranks train over gloo"
        return Check("devices", "fine", f"{why} ({machine.cores} cores)")
    names = ", ".join(
        f"{gpu.name} ({size(gpu.memory, 0)}, {gpu.capability[0]}.{gpu.capability[1]})" for gpu in machine.gpus
    )
    if found.error:
        return Check("devices", "broken", f"{names}; they cannot be used without torch", REINSTALL)
    if not found.cuda:
        return Check("devices", "degraded", f"{names}; this torch is a CPU build", f"use --device cpu, or {REINSTALL}")
    if not found.available:
        says = f"{names}; torch finds no CUDA driver that it supports"
        return Check("devices", "broken", says, "update the driver, or use --device cpu")
    unserved = [gpu for gpu in machine.gpus if not serves(found.archs, gpu)]
    if unserved:
        had = " ".join(found.archs)
        says = f"{names}; torch {found.version} is built for {had}, not for {unserved[0].name}"
        fix = "use another GPU, or install a version of torch that supports this one; --device cpu works"
        return Check("devices", "broken", says, fix)
    return Check("devices", "fine", names)


def serves(archs: tuple[str, ...], gpu: Gpu) -> bool:
    """Whether torch built for `archs` runs on a GPU: SASS of the same major and no higher minor version, or PTX of no
    higher version.
    """
    for arch in archs:
        kind, _, digits = arch.partition("_")
        number = "".join(letter for letter in digits if letter.isdigit())  # sm_90a is 9.0
        version = (int(number[:-1]), int(number[-1]))
        if version <= gpu.capability and (kind == "compute" or version[0] == gpu.capability[0]):
            return True
    return False


def precision() -> Check:
    """Whether the GPUs support bf16."""
    gpus = Machine.here().gpus
    old = [gpu.name for gpu in gpus if gpu.capability < (8, 0)]
    if old:
        return Check("precision", "fine", f"fp32 and fp16; {old[0]} has no bf16 (it needs compute capability 8.0)")
    return Check("precision", "fine", "fp32, fp16 and bf16" if gpus else "fp32 and bf16 on CPU ranks")


def backends() -> Check:
    """The collective backends of this build of torch."""
    found, gpus = preflight.torch(), Machine.here().gpus
    if found.error:
        return Check("backends", "broken", "unknown without torch", REINSTALL)
    there = [name for name, has in (("gloo", found.gloo), ("nccl", found.nccl)) if has]
    says = " and ".join(there) or "none"
    if not found.gloo:
        return Check("backends", "broken", f"{says}; CPU ranks need gloo", REINSTALL)
    if gpus and found.cuda and not found.nccl:
        return Check("backends", "degraded", f"{says}; several GPUs need nccl", f"use --device cpu, or {REINSTALL}")
    return Check("backends", "fine", says)


def all_reduce() -> Check:
    """An all-reduce of two processes over gloo, and over nccl if there are two GPUs."""
    says, found = [], preflight.torch()
    if found.error:
        return Check("all-reduce", "broken", "cannot be tested without torch", REINSTALL)
    both_gpus = found.nccl and found.available and len(Machine.here().gpus) > 1
    for backend in ("gloo", "nccl") if both_gpus else ("gloo",):
        seconds, error = preflight.all_reduce(backend)
        if error:
            fix = "check whether a firewall or proxy blocks local connections; see the line loopback"
            if backend == "nccl":
                fix = (
                    "enlarge /dev/shm (docker: --shm-size=1g); if it still fails, run with NCCL_DEBUG=INFO to find the"
                    " cause"
                )
            return Check("all-reduce", "broken", f"two ranks over {backend} failed: {error}", fix)
        says.append(f"two ranks over {backend} in {seconds:.1f} s, imports included")
    return Check("all-reduce", "fine", "; ".join(says))


_NEEDS_TORCHVISION = "only --workload resnet18 and --data mnist or cifar10 need it"


def torchvision() -> Check:
    """Whether torchvision, if installed, matches torch; only a few workloads need it."""
    if importlib.util.find_spec("torchvision") is None:
        return Check("torchvision", "fine", f"not installed; {_NEEDS_TORCHVISION} ({how_to_add('mnist')})")
    version, error = preflight.torchvision()
    if not error:
        return Check("torchvision", "fine", version)
    if "torchvision::nms" in error:
        error = f'{version} was built for another version of torch ("operator torchvision::nms does not exist")'
    fix = f"{_NEEDS_TORCHVISION}; install matching versions of torch and torchvision from the same index"
    return Check("torchvision", "degraded", error, fix)


def jupyterlab() -> Check:
    """Whether JupyterLab, jupytext and ipykernel are installed."""
    absent = [name for name in ("jupyterlab", "jupytext", "ipykernel") if version_of(name) is None]
    if absent:
        fix = "install with: python3 -m labkit setup; the commands run, script and diff work without"
        return Check("jupyterlab", "degraded", f"{' and '.join(absent)} not installed", fix)
    others = f"jupytext {version_of('jupytext')}, ipykernel {version_of('ipykernel')}"
    return Check("jupyterlab", "fine", f"{version_of('jupyterlab')}, {others}")


def widgets() -> Check:
    """Whether each widget package in the kernel matches its JupyterLab extension."""
    unfit, says = [], []
    for package, extension, fits in _HALVES:
        kernel, front = version_of(package), _extension_version(extension)
        says.append(f"{package} {kernel or 'missing'}")
        if kernel is None or front is None or not fits(release(kernel), release(front)):
            unfit.append(
                f"{package} {kernel or 'missing'} in the kernel, {extension} {front or 'missing'} in JupyterLab"
            )
    if unfit:
        fix = (
            f"the panel may stay empty; reinstall both together: pip install --force-reinstall PACKAGE, or {REINSTALL}"
        )
        return Check("widgets", "degraded", "; ".join(unfit), fix)
    return Check("widgets", "fine", ", ".join(says))


_HALVES: tuple[tuple[str, str, Callable[[tuple[int, ...], tuple[int, ...]], bool]], ...] = (
    ("anywidget", "anywidget", lambda kernel, front: kernel[:2] == front[:2]),
    ("ipywidgets", "@jupyter-widgets/jupyterlab-manager", lambda kernel, front: kernel[0] == 8 and front[0] == 5),
    ("plotly", "jupyterlab-plotly", lambda kernel, front: kernel[0] == front[0]),
)


def _extension_version(name: str) -> str | None:
    """The version of a JupyterLab extension, from the first folder in JupyterLab's search path that has it."""
    if importlib.util.find_spec("jupyter_core") is None:
        return None
    from jupyter_core.paths import jupyter_path

    for root in jupyter_path("labextensions"):
        package = Path(root) / name / "package.json"
        if package.is_file():
            return jsonlib.loads(package.read_text(encoding="utf-8")).get("version")
    return None


# ---- `labkit doctor`

LEVELS = ("fine", "degraded", "broken")
_STYLES = {"fine": "green", "degraded": "yellow", "broken": "bold red"}


def main(json: bool = False) -> int:
    """Runs every check and prints each result immediately, then the measured times of collectives; or all of it as one
    JSON object. Returns 1 if anything is broken.
    """
    done: list[Check] = []
    console = Console(stderr=json)
    for check in checks():
        done.append(check)
        if not json:
            _show(console, check)
    tables = stored(Machine.here()).tables
    for table in () if json else tables:
        console.print(as_table(table))
    worst = max((check.level for check in done), key=LEVELS.index)
    if json:
        measured = [figures(table) for table in tables]
        print(jsonlib.dumps({"level": worst, "checks": [asdict(check) for check in done], "links": measured}))
    return int(worst == "broken")


def checks() -> Iterator[Check]:
    """Yields the result of every check; an unexpected exception becomes a broken line and does not stop the others."""
    for check in CHECKS:
        try:
            yield check()
        except Exception as error:
            says = f"could not be checked: {type(error).__name__}: {error}"
            yield Check(check.__name__, "broken", says, "please report this")


def _show(console: Console, check: Check) -> None:
    mark = Text.assemble(
        ("● ", _STYLES[check.level]), (f"{check.name:<12}", "bold"), (f"{check.level:<9}", _STYLES[check.level])
    )
    console.print(mark, Text(check.says), soft_wrap=True)
    if check.fix:
        console.print(Text(f"{'':23}→ {check.fix}"), soft_wrap=True)


CHECKS: tuple[Callable[[], Check], ...] = (
    *(python, torch, devices, precision, backends, all_reduce, torchvision),
    *(jupyterlab, widgets),
    *(loopback, ports, other_users, shared_memory, runs_folder, limits, digits, warm_start, communication, compiler),
)
