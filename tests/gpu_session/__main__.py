"""`python3 -m labkit test --gpu`: prepares the environment, and runs the parts of the session one after another.

Until the environment is ready, only the standard library is used. Every part is a process of its own, which is ended
some seconds after its limit if it has not ended itself; with it end its runs. Time counts from the start of the
command.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_session.report import Report

CLONE = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(CLONE), str(CLONE / "tests")]

from labkit.setup import bootstrap, environment  # noqa: E402  standard library only

MINUTES = 25.0
_BEGAN = "LABKIT_GPU_SESSION_BEGAN"  # Unix seconds; setting up the environment may start this command again
_UNUSED = ("anywidget", "ipykernel", "ipywidgets", "jupytext", "plotly")  # requirements that no part imports
_PAGE = 10.0  # seconds between two versions of the page while a part runs
_LATE = 20.0  # seconds after its limit in which a part can end itself, with its runs
_END = 10.0  # seconds for its processes to end
_POLL_INTERVAL = 0.2


def main(argv: Sequence[str]) -> int:
    """0 if all cases of the session are as expected, 1 if one is wrong or a part failed, 2 for wrong usage or without a
    GPU, 130 if interrupted."""
    began = float(os.environ.setdefault(_BEGAN, str(time.time())))
    args = _parser().parse_args(argv)
    refusal = _prepare(argv)
    if not refusal:
        from gpu_session.parts import PARTS

        chosen = [name.strip() for name in args.only.split(",")] if args.only else list(PARTS)
        unknown = [name for name in chosen if name not in PARTS]
        refusal = f"--only must name parts ({', '.join(PARTS)}), got {unknown[0]!r}" if unknown else _no_gpu()
    if refusal:
        print(f"labkit: {refusal}", file=sys.stderr)
        return 2
    folder = Path(args.results or CLONE / "gpu-session" / time.strftime("%Y%m%d-%H%M%S")).absolute()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _session(folder, chosen, began, args.minutes)
    except KeyboardInterrupt:
        print(f"labkit: interrupted; {folder} has what was measured, and --results {folder} does the rest")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python3 -m labkit test --gpu", description="Measure what only GPUs can show.")
    parser.add_argument("--minutes", type=_minutes, default=MINUTES, help="limit of everything (default: %(default)g)")
    parser.add_argument(
        "--results", help="folder of the report, packs and runs; one of an earlier session is continued (default: a new"
        " one in gpu-session/)",
    )  # fmt: skip
    parser.add_argument("--only", metavar="PART,…", help="some parts (default: all)")
    return parser


def _minutes(text: str) -> float:
    if not 1 <= (minutes := float(text)) <= 1440:
        raise argparse.ArgumentTypeError(f"must be from 1 to 1440, got {text!r}")
    return minutes


def _prepare(argv: Sequence[str]) -> str:
    """Adds missing packages, maybe by starting the command again in another environment. Returns why the session cannot
    begin; empty if it can."""

    def missing() -> list[str]:
        return [str(one) for one in environment.missing() if one.name not in _UNUSED]

    if not missing():
        return ""
    try:
        bootstrap.ensure((), ["test", "--gpu", *argv])
    except bootstrap.SetupError as error:
        if found := missing():
            return (
                f"{', '.join(found)} are missing and could not be installed ({error}); without a network, put their"
                " wheels into a folder and set PIP_NO_INDEX=1 and PIP_FIND_LINKS to it"
            )
    return ""


def _no_gpu() -> str:
    from labkit.setup import preflight
    from labkit.setup.machine import Machine

    machine = Machine.here()
    if not machine.gpus:
        return f"the session needs a GPU, and {machine.no_gpu_reason}"
    found = preflight.torch()
    if found.error:
        return f"torch cannot be imported: {found.error}"
    if not found.available:
        return f"torch {found.version} cannot use {machine.gpus[0].name}; python3 -m labkit doctor says why"
    return ""


def _session(folder: Path, chosen: Sequence[str], began: float, minutes: float) -> int:
    from gpu_session.parts import PARTS
    from gpu_session.report import WRONG, Report
    from labkit.setup import preflight
    from labkit.setup.machine import Machine

    folder.mkdir(parents=True, exist_ok=True)
    report, end = Report(folder), began + 60 * minutes
    titles = {name: PARTS[name].title for name in chosen}
    torch, python = preflight.torch(), sys.version.split()[0]
    software = f"torch {torch.version}, CUDA {torch.cuda}, Python {python}; ready after {time.time() - began:.0f} s"
    report.add("session", began=began, minutes=minutes, machine=Machine.here().hardware, software=software)
    print(
        f"labkit: {Machine.here().hardware}; {software}; {minutes:g} minutes; the report is {report.page}", flush=True
    )
    failed = False
    try:
        for name in chosen:
            limit = min(time.time() + 60 * minutes * PARTS[name].share, end - _LATE)
            if name in report.complete() or limit < time.time():
                continue
            print(f"{name}: {PARTS[name].title} (at most {limit - time.time():.0f} s)", flush=True)
            failed |= _part(name, report, titles, limit)
    finally:
        report.write_page(titles)
    left = report.not_reached(chosen)
    wrong = [line for line in report.cases().values() if line["verdict"] == WRONG]
    counts = f"{len(report.cases())} cases, {len(wrong)} wrong, {sum(map(len, left.values()))} not reached"
    print(f"labkit: {counts}; {report.page}")
    return int(failed or bool(wrong))


def _part(name: str, report: Report, titles: dict[str, str], limit: float) -> bool:
    """Executes a part in a process of its own; returns whether it failed."""
    from gpu_session.parts import OUT_OF_TIME
    from labkit.probe.lifetime import PARENT, identity

    folder, began = report.page.parent, time.time()
    own = {"LABKIT_RUNS": str(folder / "runs"), "XDG_CACHE_HOME": str(folder / "cache"), PARENT: identity(os.getpid())}
    paths = [str(CLONE), str(CLONE / "tests"), os.environ.get("PYTHONPATH", "")]
    own["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    command = [sys.executable, "-m", "gpu_session.parts", name, str(folder), str(limit)]
    written = 0.0
    with (folder / f"{name}.err").open("w") as errors:
        part = subprocess.Popen(command, env=os.environ | own, cwd=CLONE, stderr=errors, start_new_session=True)
        try:
            while part.poll() is None and time.time() < limit + _LATE / 2:
                if time.monotonic() - written > _PAGE:
                    report.write_page(titles)
                    written = time.monotonic()
                time.sleep(_POLL_INTERVAL)
        finally:
            ended_itself = part.poll() is not None
            _end(part)
    how, says = {0: "complete", OUT_OF_TIME: "limit"}.get(part.returncode, "failed"), ""
    if not ended_itself:
        how, says = "limit", "it did not end by itself"
    elif how == "failed":
        last = (folder / f"{name}.err").read_text(errors="replace").strip().splitlines()[-1:]
        says = last[0] if last else f"exit code {part.returncode}"
    report.add("end", part=name, seconds=round(time.time() - began, 1), how=how, says=says)
    report.write_page(titles)
    print(f"  {how}{f': {says}' if says else ''}; {time.time() - began:.0f} s", flush=True)
    return how == "failed"


def _end(part: subprocess.Popen[bytes]) -> None:
    """Ends a part and what it started in its process group; its runs end with it."""
    for what in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(part.pid, what)
            part.wait(_END / 2)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    part.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
