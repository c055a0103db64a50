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
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

CLONE = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(CLONE), str(CLONE / "tests")]

from labkit.setup import environment  # noqa: E402  standard library only

MINUTES = 25.0
_BEGAN = "LABKIT_GPU_SESSION_BEGAN"  # Unix seconds; setting up the environment may start this command again
_UNUSED = ("anywidget", "ipykernel", "ipywidgets", "jupytext", "plotly")  # requirements that no part imports
_PAGE = 10.0  # seconds between two versions of the page while a part runs
_LATE = 30.0  # seconds after its limit in which a part can end itself, or is ended, with its runs
_END = 5.0  # seconds for its processes to end, twice
_LEAST = 10.0  # seconds that must be left for another part
_POLL_INTERVAL = 0.2


def main(argv: Sequence[str]) -> int:
    """0 if all cases of the session are as expected, 1 if one is wrong or a part failed, 2 for wrong usage or without a
    GPU, 130 if interrupted."""
    began = float(os.environ.setdefault(_BEGAN, str(time.time())))
    args = _parser().parse_args(argv)
    refusal = _prepare(argv)
    if not refusal:
        from gpu_session.parts import PARTS

        chosen = _chosen(args.only, list(PARTS))
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
    parser.add_argument(
        "--only", metavar="PART[/CASE];…", help="some parts, or the cases of a part whose names begin so (default: all)"
    )
    return parser


def _chosen(only: str | None, parts: Sequence[str]) -> dict[str, list[str]]:
    """By part, in their order, the beginnings of the names of its cases that are executed; none: all of them."""
    chosen: dict[str, list[str]] = {}
    for one in only.split(";") if only else parts:
        part, _, case = one.strip().partition("/")
        chosen.setdefault(part, []).extend([case] if case else [])
    known = [part for part in parts if part in chosen]
    return {part: chosen[part] for part in [*known, *(part for part in chosen if part not in parts)]}


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
        environment.ensure((), ["test", "--gpu", *argv])
    except environment.SetupError as error:
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


def _session(folder: Path, chosen: dict[str, list[str]], began: float, minutes: float) -> int:
    from gpu_session.parts import OUT_OF_TIME, PARTS
    from gpu_session.report import WRONG, Report
    from labkit.setup import preflight
    from labkit.setup.machine import Machine

    folder.mkdir(parents=True, exist_ok=True)
    report, end = Report(folder), began + 60 * minutes
    titles = {name: part.title for name, part in PARTS.items()}
    torch, python = preflight.torch(), sys.version.split()[0]
    software = f"torch {torch.version}, CUDA {torch.cuda}, Python {python}; ready after {time.time() - began:.0f} s"
    report.add("session", began=began, minutes=minutes, machine=Machine.here().hardware, software=software)
    print(
        f"labkit: {Machine.here().hardware}; {software}; {minutes:g} minutes; the report is {report.page}", flush=True
    )
    runtime = tempfile.TemporaryDirectory(prefix="labkit-")  # of a warm server of its own
    try:
        for name in chosen:
            limit = min(time.time() + 60 * minutes * PARTS[name].share, end - _LATE)
            if limit - time.time() < _LEAST:
                continue
            print(f"{name}: {PARTS[name].title} (at most {limit - time.time():.0f} s)", flush=True)
            command = [sys.executable, "-m", "gpu_session.parts", name, str(folder), str(limit), *chosen[name]]
            started = time.time()
            own = {"XDG_RUNTIME_DIR": runtime.name}
            code, error = run_part(command, folder / f"{name}.err", limit, lambda: report.write_page(titles), own)
            how = {0: "complete", OUT_OF_TIME: "limit", None: "limit"}.get(code, "failed")
            says = "it did not end by itself" if code is None else error if how == "failed" else ""
            seconds = round(time.time() - started, 1)
            report.add("end", part=name, seconds=seconds, how=how, says=says)
            print(f"  {how}{f': {says}' if says else ''}; {seconds:.0f} s", flush=True)
    finally:
        runtime.cleanup()
        report.write_page(titles)
    failed = [one["part"] for one in report.ends().values() if one["how"] == "failed"]
    left = report.not_reached(chosen)
    wrong = [line for line in report.cases().values() if line["verdict"] == WRONG]
    counts = f"{len(report.cases())} cases, {len(wrong)} wrong, {sum(map(len, left.values()))} not reached"
    print(f"labkit: {counts}; {report.page}")
    return int(bool(failed or wrong))


def run_part(
    command: Sequence[str],
    errors: Path,
    limit: float,
    tick: Callable[[], None] = lambda: None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> tuple[int | None, str]:
    """Executes a part as a process of its own, until some seconds after its limit (Unix seconds), with additional
    variables in its `environment`; calls `tick` regularly. Returns the exit code, None if it did not end by itself, and
    the last line of its errors."""
    from labkit.probe.lifetime import PARENT, identity

    own = {"LABKIT_RUNS": str(errors.parent / "runs"), "XDG_CACHE_HOME": str(errors.parent / "cache")}
    paths = [str(CLONE), str(CLONE / "tests"), os.environ.get("PYTHONPATH", "")]
    own |= {PARENT: identity(os.getpid()), "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    ticked = 0.0
    with errors.open("w") as file:
        part = subprocess.Popen(
            command, env=os.environ | own | environment, cwd=CLONE, stderr=file, start_new_session=True
        )
        try:
            while part.poll() is None and time.time() < limit + _LATE - 2 * _END:
                if time.monotonic() - ticked > _PAGE:
                    tick()
                    ticked = time.monotonic()
                time.sleep(_POLL_INTERVAL)
            code = part.poll()
        finally:
            _end(part)
    return code, (errors.read_text(errors="replace").strip().splitlines() or [""])[-1]


def _end(part: subprocess.Popen[bytes]) -> None:
    """Ends a part and the processes in its group, which have some seconds to end their own; its runs end with it."""
    for what in (signal.SIGTERM, signal.SIGKILL):
        last = time.monotonic() + _END
        try:
            os.killpg(part.pid, what)
            while time.monotonic() < last:
                part.poll()
                os.killpg(part.pid, 0)
                time.sleep(_POLL_INTERVAL)
        except ProcessLookupError:
            break
    part.wait()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # before the session began
        sys.exit(130)
