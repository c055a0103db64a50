"""Checks of the software: Python, torch and its back ends, JupyterLab and the widgets."""

from __future__ import annotations

import importlib.util
import json as jsonlib
import sys
from collections.abc import Callable
from pathlib import Path

from labkit.common.units import size
from labkit.frontends.doctor.check import REINSTALL, Check, version_of
from labkit.setup import preflight
from labkit.setup.environment import active, how_to_add, release, requirements
from labkit.setup.machine import Gpu, Machine


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
    return Check(
        "jupyterlab",
        "fine",
        f"{version_of('jupyterlab')}, jupytext {version_of('jupytext')}, ipykernel {version_of('ipykernel')}",
    )


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
