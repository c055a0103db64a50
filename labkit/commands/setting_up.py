"""The environment, and what goes on in it as another program: JupyterLab and pytest."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from labkit.bootstrap import become
from labkit.commands.shared import Refused
from labkit.environment import CLONE
from labkit.progress import Progress

_FIRST_LAB = "labs/00_start_here.py"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def setup(args: argparse.Namespace) -> int:
    """The environment is there by now."""
    print(f"ready: {sys.executable}")
    return 0


def lab(args: argparse.Namespace) -> int:
    """Goes on as JupyterLab."""
    if not (CLONE / _FIRST_LAB).is_file():
        raise Refused(f"there is no {_FIRST_LAB} in {CLONE}; start the lab from a clone of the project")
    os.environ.update(lab_environment())
    become(lab_command(args), folder=CLONE)
    return 0


def lab_command(args: argparse.Namespace) -> list[str]:
    """JupyterLab's command line: its token stays on, and it listens on this machine alone unless told otherwise."""
    return [
        *(sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={CLONE}", f"--ServerApp.ip={args.ip}"),
        f"--LabApp.default_url=/lab/tree/{_FIRST_LAB}",
        *([f"--ServerApp.port={args.port}"] if args.port else []),
        *(["--no-browser"] if args.no_browser else []),
        *(["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []),
        *args.rest,
    ]


def lab_environment() -> dict[str, str]:
    """What JupyterLab and its kernels get to know: the lab's settings, the place of the runs, and where labkit is."""

    def in_front(variable: str, path: Path) -> str:
        return os.pathsep.join(part for part in (str(path), os.environ.get(variable)) if part)

    return {
        "JUPYTER_CONFIG_PATH": in_front("JUPYTER_CONFIG_PATH", CLONE / "labkit" / "jupyter"),
        "LABKIT_RUNS": os.environ.get("LABKIT_RUNS") or str(CLONE / "runs"),
        "PYTHONPATH": in_front("PYTHONPATH", CLONE),
    }


def test(args: argparse.Namespace) -> int:
    """Goes on as pytest, from the clone's root: two tests at a time, since much of a test is waiting for processes to start."""
    _see_to_browser()
    become([sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", *args.rest], folder=CLONE)
    return 0


def _see_to_browser() -> None:
    if any(shutil.which(name) for name in _BROWSERS):
        return
    may_install = hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("apt-get")
    if may_install:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL, "check": False}
        settings = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        with Progress() as progress:
            progress.step("installing Chromium for the tests in a browser (apt-get install chromium fonts-dejavu-core)")
            subprocess.run(["apt-get", "update", "-qq"], env=settings, **quiet)
            subprocess.run(
                ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium", "fonts-dejavu-core"], env=settings, **quiet
            )
    if not shutil.which("chromium"):
        print("labkit: there is no Chromium on the PATH; the tests in a browser are skipped until one is installed", file=sys.stderr)
