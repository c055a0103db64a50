"""A Spec on a machine: what is resolved for it, and what the machine cannot run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.common.files import user_cache
from labkit.common.units import counted, size
from labkit.plan.fields import SpecError
from labkit.setup import environment, preflight
from labkit.setup.limits import ConfigError, in_force
from labkit.setup.preflight import Needs

if TYPE_CHECKING:
    from labkit.plan.spec import Spec
    from labkit.setup.machine import Gpu, Machine

_FOLDER = "data"  # of data sets that are read from files, below the working folder


def settled(spec: Spec, machine: Machine) -> Spec:
    """A Spec with device, number of ranks and precision resolved for `machine`; `SpecError` if it cannot run there.

    Whether packages load and files are available is not checked: `check_available` does it, which may take long.
    """
    device = spec.device
    if device == "auto":
        device = "cuda" if machine.gpus else "cpu"
    if device == "cuda" and not machine.gpus:
        raise SpecError("device", f"--device cuda is not available: {machine.no_gpu_reason}; use --device cpu")
    nproc = spec.nproc or machine.default_nproc(device)
    if device == "cuda" and nproc > len(machine.gpus):
        raise SpecError(
            "nproc",
            f"--nproc {nproc} exceeds the {counted(len(machine.gpus), 'GPU')} of this machine; "
            f"use --nproc {len(machine.gpus)}, or --device cpu for CPU ranks",
        )
    if device == "cpu" and nproc > machine.max_cpu_ranks:
        raise SpecError(
            "nproc",
            f"--nproc {nproc} exceeds the maximum of {machine.max_cpu_ranks} CPU ranks for "
            f"{counted(machine.cores, 'core')}; use --nproc {machine.max_cpu_ranks}",
        )
    _check_limits(nproc, device)
    spec = replace(spec, device=device, nproc=nproc)
    if spec.script is not None:
        return spec
    gpus = machine.gpus[:nproc]
    spec = replace(spec, precision=spec.precision or default_precision(spec, gpus))
    refusal = unsupported(spec.precision, device, gpus)
    if refusal:
        raise SpecError("precision", refusal)
    _check_machine(spec, machine)
    return spec


def _check_limits(nproc: int, device: str) -> None:
    """Raises `SpecError` if this machine or user allows fewer ranks, or if their configuration is invalid."""
    try:
        limits = in_force()
    except ConfigError as error:
        raise SpecError("nproc", str(error)) from None
    if device == "cpu" and nproc > limits.slots:
        raise SpecError(
            "nproc", f"--nproc {nproc} exceeds the {limits.slots} CPU slots of this machine; use --nproc {limits.slots}"
        )
    if limits.ranks is not None and nproc > limits.ranks:
        raise SpecError(
            "nproc",
            f"--nproc {nproc} exceeds the limit of {limits.ranks} ranks ({limits.sources['ranks']}); use --nproc"
            f" {limits.ranks}",
        )


def unsupported(precision: str, device: str, gpus: Sequence[Gpu]) -> str | None:
    """Why a precision does not work on CPU ranks, or on these GPUs; None if it does."""
    if precision == "fp16" and device == "cpu":
        return "--precision fp16 is not supported on CPU ranks; use --precision fp32 or bf16"
    if precision == "tf32" and device == "cpu":
        return "--precision tf32 is not supported on CPU ranks, only on GPUs; use --precision fp32"
    if precision in ("tf32", "bf16") and device == "cuda":
        for gpu in gpus:
            if gpu.capability < (8, 0):
                return (
                    f"--precision {precision} needs a GPU of compute capability 8.0 or newer, and {gpu.name}"
                    f" has {gpu.capability[0]}.{gpu.capability[1]}; use --precision fp16"
                )
    return None


def check_available(spec: Spec) -> None:
    """Raises `SpecError` if a package does not load, or if data are neither on this machine nor can be downloaded.

    It may take seconds if `takes_long` says so; a front end then calls it in a thread.
    """
    for field, name, needs in _needs(spec):
        refusal = preflight.available(name, needs, spec.data_dir or _FOLDER)
        if refusal:
            raise SpecError(field, refusal)


def draw_data(spec: Spec) -> None:
    """Draws the data of a Spec into the cache folder, if they are drawn and not there yet, which takes seconds: once on
    a machine, and then for all ranks of all runs. Raises `SpecError` if it fails."""
    drawing = None if spec.script else spec.data_row.drawing(spec.train_samples, spec.options)
    if drawing is None:
        return
    path = user_cache() / "labkit" / drawing.file
    if path.is_file() and path.stat().st_size >= drawing.size:
        return
    home = Path(__file__).parents[2]  # where no file of the user can shadow a module
    argv = [sys.executable, "-m", drawing.module, *drawing.arguments]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # it fails before torch is imported
        done = subprocess.run(argv, cwd=home, capture_output=True, encoding="utf-8", errors="replace")
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        why = lines[-1] if done.returncode else ""
    except OSError as error:
        why = str(error)
    if why:
        raise SpecError(
            "data", f"{spec.data} could not be drawn into {path}: {why}; set XDG_CACHE_HOME to a folder with space"
        )


def takes_long(spec: Spec) -> bool:
    """Whether `check_available` may take seconds; otherwise there is nothing to look for."""
    return any(preflight.takes_long(needs) for _, _, needs in _needs(spec))


def _needs(spec: Spec) -> Iterator[tuple[str, str, Needs]]:
    if spec.script is None:
        for field, row in (("strategy", spec.strategy_row), ("workload", spec.workload_row), ("data", spec.data_row)):
            yield field, row.name, row.needs


def _check_machine(spec: Spec, machine: Machine) -> None:
    missing = {field: preflight.installed(name, needs) for field, name, needs in _needs(spec)}
    for field, refusal in (
        ("strategy", missing["strategy"] or spec.strategy_row.unmet(spec, machine)),
        ("options", _compiler_missing(spec)),
        ("options", _too_many_workers(spec, machine)),
        ("samples", _too_many_samples(spec, machine)),
        ("workload", missing["workload"]),
        ("data", missing["data"]),
    ):
        if refusal:
            extra = next((needs.extra for of, _, needs in _needs(spec) if of == field), None)
            raise SpecError(field, refusal, extra if extra and not environment.has(extra) else None)


def _compiler_missing(spec: Spec) -> str | None:
    if not spec.options.get("compile"):
        return None
    return preflight.compiler_missing("compile needs a C++ compiler", "compile=false")


def _too_many_workers(spec: Spec, machine: Machine) -> str | None:
    each, ranks = spec.options["workers"], spec.processes
    if each * ranks <= machine.max_workers:
        return None
    return (
        f"workers={each} on {ranks} ranks starts {each * ranks} processes, more than the maximum of"
        f" {machine.max_workers} for {counted(machine.cores, 'core')}; use workers={machine.max_workers // ranks} or"
        " less"
    )


def _too_many_samples(spec: Spec, machine: Machine) -> str | None:
    """Every rank holds the whole data set in memory."""
    each, ranks = spec.data_row.sample_bytes(spec.options), spec.processes
    if spec.train_samples * each * ranks <= machine.memory:
        return None
    fits = machine.memory // (each * ranks)
    return (
        f"{spec.train_samples} samples of {spec.data} need {size(spec.train_samples * each)} on each of {ranks} ranks,"
        f" and this machine has {size(machine.memory)} of memory; use --samples {fits} or less"
    )


def default_precision(spec: Spec, gpus: Sequence[Gpu]) -> str:
    """fp16 for GPUs with tensor cores for fp16 but not for bf16, such as a T4, if the strategy can train in it with
    these options; otherwise fp32."""
    if spec.device != "cuda" or not any((7, 0) <= gpu.capability < (8, 0) for gpu in gpus):
        return "fp32"
    try:
        return replace(spec, precision="fp16").precision
    except SpecError:
        return "fp32"
