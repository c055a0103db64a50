"""The commands that concern the lab itself and the course: setup, lab and test; progress, class, grade, claims, schema,
doctor and bench."""

from __future__ import annotations

import argparse
import getpass
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from labkit.cli.shared import WIDE, Refused, console, interrupts, say
from labkit.common.files import write_output
from labkit.common.text import visible_line
from labkit.common.units import counted
from labkit.course.exercises import my_progress
from labkit.record.folder import runs_root
from labkit.setup import environment
from labkit.setup.environment import BROWSERS, CLONE, FIREFOX, RENDERER, RENDERER_VARIABLE, VENV, VENV_PYTHON, become
from labkit.setup.progress import Progress

# ---- the commands setup, lab and test


_FIRST_LAB = "labs/00_start_here.py"
_SOCKET = "kernel-00000000-0000-0000-0000-000000000000-ipc-5"  # the longest name of a kernel socket
_PANEL = "--IPKernelApp.extra_extensions=labkit.frontends.panel"
_LONGEST_SOCKET_PATH = 104  # bytes, including the terminating zero: 108 on Linux, 104 on macOS


def setup(args: argparse.Namespace) -> int:
    """Reports that the environment is ready, or why a requested extra was not installed."""
    for extra in args.extras_asked:
        if not environment.has(extra):
            raise Refused(environment.why_not_added(extra), code=1)
    say(f"ready: {sys.executable}")
    return 0


def lab(args: argparse.Namespace) -> int:
    """Replaces this process with JupyterLab."""
    if args.port is not None and args.port < 1024 and hasattr(os, "geteuid") and os.geteuid() != 0:
        raise Refused(f"--port {args.port} needs administrator rights; use a port from 1024 to 65535")
    if not (CLONE / _FIRST_LAB).is_file():
        raise Refused(f"{CLONE} does not contain {_FIRST_LAB}; start the lab from a clone of the project")
    os.environ.update(lab_environment())
    become(lab_command(args), folder=CLONE)
    return 0


def lab_command(args: argparse.Namespace) -> list[str]:
    """The command line of JupyterLab: token enabled, listening on this machine only by default, and kernels without TCP
    ports."""
    return [
        *(sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={CLONE}", f"--ServerApp.ip={args.ip}"),
        f"--LabApp.default_url=/lab/tree/{_FIRST_LAB}",
        *([f"--ServerApp.port={args.port}"] if args.port else []),
        *kernel_transport(),
        *(["--no-browser"] if args.no_browser else []),
        *(["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []),
        *args.rest,
    ]


def kernel_transport() -> list[str]:
    """Unix sockets between JupyterLab and its kernels, if supported: every user of the machine could connect to a TCP
    port."""
    return ["--KernelManager.transport=ipc"] if hasattr(socket, "AF_UNIX") and os.name != "nt" else []


def private_runtime_folder() -> Path:
    """The folder for connection files and sockets of JupyterLab: private to this user, with a path short enough for
    sockets.

    It is Jupyter's default runtime folder if that is suitable, otherwise a new one in the folder for temporary files.
    """
    from jupyter_core.paths import jupyter_runtime_dir

    usual = Path(jupyter_runtime_dir())
    if len(os.fsencode(usual / _SOCKET)) < _LONGEST_SOCKET_PATH and _is_made_private(usual):
        return usual
    own = Path(tempfile.gettempdir(), f"labkit-{os.geteuid()}")
    return own if _is_made_private(own) else Path(tempfile.mkdtemp(prefix="labkit-"))  # mode 0700


def _is_made_private(folder: Path) -> bool:
    """Makes a folder private to its owner; False if it belongs to another user or is not writable."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
            return False  # its owner could read it
        folder.chmod(0o700)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def kernel_of_this_python(runtime: Path) -> Path:
    """A folder of Jupyter data in `runtime` whose kernel `python3` names this Python by its path, and not as `python`:
    only then does Jupytext choose it for a script that names no kernel. The kernel imports the panel when it starts."""
    from ipykernel.kernelspec import write_kernel_spec

    folder = runtime / f"labkit-{hashlib.sha256(f'{sys.executable} {_PANEL}'.encode()).hexdigest()[:8]}"
    spec = folder / "kernels" / "python3"
    if not spec.exists():
        write_kernel_spec(spec, extra_arguments=[_PANEL])
    return folder


def lab_environment() -> dict[str, str]:
    """Environment variables of JupyterLab and its kernels: Jupyter's settings, its kernel, the folder of the runs, the
    path of labkit, and how plotly shows figures."""
    from jupyter_core.paths import jupyter_runtime_dir

    runtime = private_runtime_folder() if kernel_transport() else Path(jupyter_runtime_dir())

    def prepended(variable: str, path: Path) -> str:
        return os.pathsep.join(part for part in (str(path), os.environ.get(variable)) if part)

    return {
        "JUPYTER_CONFIG_PATH": prepended("JUPYTER_CONFIG_PATH", CLONE / "labkit" / "setup" / "jupyter"),
        "JUPYTER_PATH": prepended("JUPYTER_PATH", kernel_of_this_python(runtime)),
        "JUPYTER_RUNTIME_DIR": str(runtime),
        "LABKIT_RUNS": os.environ.get("LABKIT_RUNS") or str(CLONE / "runs"),
        "PYTHONPATH": prepended("PYTHONPATH", CLONE),
        RENDERER_VARIABLE: os.environ.get(RENDERER_VARIABLE) or RENDERER,
    }


_STAND_IN = "--cuda-stand-in"  # the tests on a CUDA machine without a GPU, instead of the others


def test(args: argparse.Namespace) -> int:
    """Runs pytest in the root of the clone: three tests at a time, because tests often wait for processes.

    With --cuda-stand-in it runs the tests that need a CUDA machine, on one that needs no GPU; with --all alone both.
    Without arguments, and with --all, the tests of trackers and Kubeflow follow, with their packages.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process of a test compiles the lab again
    if _STAND_IN in args.rest:
        become(_on_stand_in([argument for argument in args.rest if argument != _STAND_IN]), folder=CLONE)
    _ensure("the browser tests", BROWSERS, "chromium", "fonts-dejavu-core")
    _ensure("the tests in Firefox", FIREFOX, "firefox-esr")
    _ensure("the tests of Slurm", ("slurmctld",), "slurm-wlm", "munge")
    command = [sys.executable, "-m", "pytest", "-n", "3", "--dist", "worksteal", *args.rest]
    if args.rest not in ([], ["--all"]):
        become(command, folder=CLONE)
    codes = [subprocess.call(command, cwd=CLONE), _call_with_clients()]
    if args.rest:
        codes.append(subprocess.call(_on_stand_in([]), cwd=CLONE))
    return max(codes)


_CLIENTS = {  # MLflow brings pyarrow, too; the newest SkyPilot that pip installs next to the others
    "trackio": "0.43.0",
    "mlflow": "3.17.2",
    "wandb": "0.31.0",
    "kubeflow": "0.5.0",
    "skypilot": "0.9.2",
}
_TESTS_OF_CLIENTS = ("tests/exports/test_exports.py", "tests/launch/test_kubeflow.py", "tests/jobs/test_pack.py")


def _call_with_clients() -> int:
    """Runs the tests that need the clients of other tools, in `.venv-clients`: this environment with their packages,
    which are not part of it because the lab must work without them. If they cannot be installed, it says so."""
    place = CLONE / ".venv-clients"
    python = str(place / VENV_PYTHON.relative_to(VENV))
    modules = [environment.OPTIONAL[name] for name in _CLIENTS]
    has_all = f"import sys; from importlib.util import find_spec as has; sys.exit(not all(map(has, {modules})))"
    if not place.exists() or subprocess.call([python, "-c", has_all]):
        paths = [path for path in sys.path if path.endswith("site-packages")]
        with Progress() as progress:
            progress.step(f"installing {', '.join(_CLIENTS)} in {place} for the tests that need them")
            made = subprocess.run([sys.executable, "-m", "venv", str(place)], capture_output=True, check=False)
            for libraries in [*place.glob("lib/*/site-packages"), *place.glob("Lib/site-packages")]:
                lines = (f"import site; site.addsitedir({path!r})\n" for path in paths)
                (libraries / "labkit.pth").write_text("".join(lines), encoding="utf-8")
            versions = [f"{name}=={version}" for name, version in _CLIENTS.items()]
            constraints = ("-c", str(environment.CONSTRAINTS))
            install = [python, "-m", "pip", "install", "-q", "--no-compile", *constraints, *versions]
            if made.returncode or subprocess.run(install, capture_output=True, check=False).returncode:
                say(f"the tests with {', '.join(_CLIENTS)} are skipped: these cannot be installed here")
                return 0
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # for torchrun
    chosen = "parquet or skypilot_reads or trackio or mlflow or wandb or kubeflow"
    command = [python, "-m", "pytest", "-n", "2", "-k", chosen, *_TESTS_OF_CLIENTS]
    return subprocess.call(command, cwd=CLONE, env=os.environ | {"PATH": path, "PYTHONPATH": str(CLONE)})


def _on_stand_in(arguments: list[str]) -> list[str]:
    """The command that runs pytest on two T4s that need no GPU, two files at a time; by default all tests of that
    folder, and with --coverage a table of the statements that only CUDA reaches."""
    tests = CLONE / "tests"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tests), str(CLONE), os.environ.get("PYTHONPATH")]))
    if not any(argument.startswith("tests/") for argument in arguments):
        arguments = [str(tests / "cuda_stand_in"), *arguments]
    covered = [str(tests / "cuda_stand_in" / "covered.py")] if "--coverage" in arguments else []
    arguments = [argument for argument in arguments if argument != "--coverage"]
    pytest = ("-m", "pytest", "-n", "2", "--dist", "loadfile")
    return [sys.executable, "-m", "cuda_stand_in", "t4x2", *covered, *pytest, *arguments]


def _ensure(what: str, programs: Sequence[str], *packages: str) -> None:
    """Installs Debian packages that some tests need, if none of `programs` is there and this user may install packages,
    and says so before; otherwise says how to install them, and that these tests are skipped until then."""
    if any(shutil.which(name) for name in programs):
        return
    apt = shutil.which("apt-get")
    if apt and hasattr(os, "geteuid") and os.geteuid() == 0:
        quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        settings = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        install = [apt, "install", "-y", "-qq", "--no-install-recommends", *packages]
        with Progress() as progress:
            progress.step(
                f"{what} need {programs[0]}, which is not on the PATH: installing the Debian packages"
                f" {' and '.join(packages)} on this machine (apt-get install {' '.join(packages)})"
            )
            for command in ([apt, "update", "-qq"], install):
                subprocess.run(command, env=settings, check=False, **quiet)
    if not any(shutil.which(name) for name in programs):
        way = f"sudo apt-get install {' '.join(packages)}" if apt else f"install {programs[0]}"
        missing = f"{what} are skipped because {programs[0]} is not on the PATH; to run them: {way}"
        print(f"labkit: {visible_line(missing)}", file=sys.stderr)


# ---- the commands progress, class, grade, claims, schema, doctor and bench


_AGAIN = 5.0  # seconds until a zip that is followed is compared with the runs folder again


def mcp(args: argparse.Namespace) -> int:
    """Serves the lab to an assistant until it closes the standard input."""
    from labkit.cli.mcp_server import server

    server(args.allow_run).run("stdio")
    return 0


def progress(args: argparse.Namespace) -> int:
    """Prints the progress of the exercises, and how near the predictions were; with --zip writes what a class is read
    from."""
    if args.zip is not None:
        return _hand_in(args)
    if args.follow:
        raise Refused("--follow writes a zip again and again; name it with --zip")
    page = my_progress()
    if args.json:
        print(json.dumps(page.to_json()))
    else:
        say(*str(page).splitlines())
    return 0


def _hand_in(args: argparse.Namespace) -> int:
    """Writes the zip, with --follow again when something has changed, until Ctrl-C or SIGTERM."""
    from labkit.course.classroom.learners import handed_in
    from labkit.jobs import zipped

    path = Path(args.zip)
    path = path / f"{_user()}.zip" if path.is_dir() else path
    written: bytes | None = None
    with interrupts() as interrupted:
        while True:
            files, answered = handed_in(runs_root())
            data = zipped(files, answered)
            if data != written:
                try:
                    write_output(path, data)
                except OSError as error:
                    raise Refused(f"{path} cannot be written: {error.strerror}", code=1) from None
                if written is None:
                    number = sum(name.endswith("/status.json") for name in files)
                    runs = counted(number, "run")
                    if args.json:
                        print(json.dumps({"file": str(path), "runs": number}), flush=True)
                    else:
                        say(f"{path}: your exercises, and what {runs} measured, without scripts, logs and checkpoints")
                written = data
            if not args.follow or interrupted.wait(_AGAIN):
                return 0


def _user() -> str:
    """Who works here: in JupyterHub its user, because the user of the system may be the same for all."""
    try:
        name = os.environ.get("JUPYTERHUB_USER") or getpass.getuser()
    except (OSError, KeyError):  # the system does not know the user of this process
        name = "learner"
    return re.sub(r"[^\w.@+-]", "-", name).lstrip(".") or "learner"


def classroom(args: argparse.Namespace) -> int:
    """Prints a class, or writes it as a page."""
    from labkit.course.classroom import page
    from labkit.course.classroom.overview import Class
    from labkit.frontends.terminal import class_tables

    try:
        settings = {"grades": args.grades, "minutes": args.minutes, "hide_names": args.hide_names}
        found = Class(args.folder, **settings).read()
    except ValueError as error:
        raise Refused(str(error)) from None
    if args.html is not None:
        from labkit.frontends.handout import class_page

        path = Path(args.html)
        if path.is_dir():
            raise Refused(f"{path} is a folder; give the name of the file with --html")
        try:
            class_page(found).write(path)
        except OSError as error:
            raise Refused(f"{path} cannot be written: {error.strerror}") from None
    if args.json:
        print(json.dumps(found.to_json()))
    elif args.html is not None:
        say(f"{args.html}: {page.title(found)}")
    else:
        console(args, WIDE).print(class_tables(found))
    return 0


def grade(args: argparse.Namespace) -> int:
    """Judges a folder of submissions and writes a CSV."""
    from labkit.course import grade as graded
    from labkit.course.build.sandbox import Limits, isolation
    from labkit.course.classroom.overview import grades_of

    folder = Path(args.folder)
    if not folder.is_dir():
        raise Refused(f"{folder} is not a folder")
    output = Path(args.output) if args.output else grades_of(folder)
    say(isolation())
    try:
        rows = graded.grade(
            folder,
            args.exercise,
            Limits(seconds=args.timeout, cpu_seconds=max(1, round(args.timeout))),
            lambda row: say(visible_line(f"{row.verdict:8} {row.name}  {row.exercise}: {row.message}")),
        )
    except LookupError as error:
        raise Refused(error.args[0]) from None
    try:
        graded.write(rows, output)
    except OSError as error:
        raise Refused(f"{output} cannot be written: {error.strerror}; name another file with -o", code=1) from None
    right = sum(row.verdict == "right" for row in rows)
    say(f"{right} of {len(rows)} answers are right; the figures are in {output}")
    return 0


def claims(args: argparse.Namespace) -> int:
    """Tests claims and prints the verdicts."""
    from labkit.course.claims import on_trial
    from labkit.launch.job import LaunchError

    try:
        verdicts = on_trial(*args.names, quick=args.quick, rounds=args.rounds)
    except (LookupError, ValueError) as error:
        raise Refused(error.args[0]) from None
    except (LaunchError, OSError) as error:
        raise Refused(str(error), code=1) from None
    if args.json:
        print(json.dumps({"claims": [verdict.to_json() for verdict in verdicts]}))
    else:
        console(args, WIDE).print(verdicts)
    return 0


def schema(args: argparse.Namespace) -> int:
    """Prints the JSON Schemas of events and of the summary, as one JSON object."""
    from labkit.record.documents import schemas

    print(json.dumps(schemas(), indent=None if args.json else 2))
    return 0


def doctor(args: argparse.Namespace) -> int:
    """Prints what this machine supports, with `--calibrate` after measuring its communication."""
    from labkit.frontends.doctor import main

    if args.calibrate:
        _calibrate(args.nproc)
    elif args.nproc is not None:
        raise Refused("--nproc is the number of ranks for --calibrate; add --calibrate, or omit --nproc")
    return main(json=args.json)


def _calibrate(nproc: int | None) -> None:
    from labkit.prediction.links import store
    from labkit.runs.calibration import CalibrationError, calibrate, plan

    try:
        planned = plan(nproc)
    except ValueError as error:
        raise Refused(f"--{error}") from None
    try:
        with Progress() as progress:
            progress.step(f"measuring communication between {planned.ranks} {planned.backend} ranks")
            table = calibrate(planned, progress.detail)
    except CalibrationError as error:
        raise Refused(str(error), code=1) from None
    try:
        store(table)
    except OSError as error:
        raise Refused(f"the measured times cannot be stored: {error}", code=1) from None


def bench(args: argparse.Namespace) -> int:
    """Measures the performance of the lab itself; the benchmarks stand beside the tests of the clone."""
    tests = CLONE / "tests"
    if not (tests / "bench").is_dir():
        raise Refused(f"{CLONE} has no tests/bench; start it from a clone of the project", code=2)
    sys.path.insert(0, str(tests))
    from bench.main import main

    try:
        given = {"rounds": args.rounds, "minutes": args.minutes, "ranks": args.ranks, "results": args.results}
        return main(args.json, args.only, args.save, **given)
    except ValueError as error:
        raise Refused(str(error), code=2) from None
