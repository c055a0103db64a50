"""Jobs for other engines: submitted to Slurm as a run that is followed here, or written as the file of an engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit.common.arguments import check_choice
from labkit.common.atomic import write_output
from labkit.engines.job_files import DEFAULT, Profile, profile, skypilot, trainjob
from labkit.engines.portable import Portable, of_spec
from labkit.launch import slurm
from labkit.plan.spec import Spec
from labkit.runs.handle import Run
from labkit.runs.settling import named, with_ranks

# Engines by file, and the command that submits it elsewhere.
FILES: dict[str, tuple[Callable[[Portable, Profile], str], str]] = {
    "kubeflow": (trainjob, "kubectl create -f"),
    "skypilot": (skypilot, "sky launch"),
}
ENGINES = (slurm.ENGINE, *FILES)


def submit(
    what: str | os.PathLike[str] | Spec,
    *,
    engine: str = slurm.ENGINE,
    nodes: int = 1,
    profile_name: str = DEFAULT,
    output: str | os.PathLike[str] | None = None,
    **fields: Any,
) -> Run | Path:
    """Submits a job to Slurm and returns its run, which is followed as any other one and survives this process; or
    writes the file of another engine to `output` (default: NAME-ENGINE.yaml) and returns its path.

    `nproc` is the number of ranks of all `nodes`. Raises `SpecError`, `ConfigError` for the profile, and `LaunchError`
    if Slurm is absent or refuses the job; `OSError` if there is a file at `output` that the lab did not write.
    """
    check_choice("engine", engine, ENGINES)
    site = profile(profile_name)
    spec = named(what, **fields)
    spec = with_ranks(replace(spec, device="cuda") if spec.device == "auto" and site.gpu else spec)
    if engine == slurm.ENGINE:
        return Run(slurm.start(spec, nodes, site))
    path = Path(output or f"{spec.name}-{engine}.yaml")
    write_output(path, FILES[engine][0](of_spec(spec, nodes), site))
    return path
