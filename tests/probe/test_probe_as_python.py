"""Scripts are not affected by the probe: output, exit codes and end are those under python."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import processes_of, wait_until
from places import SCRIPTS
from probed import PROBE, Told, environment, launch, watched


def test_a_script_cannot_tell_the_difference(tmp_path):
    def told_by(*start: object, run: Path | None = None) -> tuple:
        for name in ("left.txt", "left.gz"):
            (tmp_path / name).unlink(missing_ok=True)
        done = launch([*start, SCRIPTS / "identity.py", tmp_path, 3], run)
        return (
            done.returncode,
            done.stdout,
            done.stderr,
            (tmp_path / "left.txt").read_text(),
            (tmp_path / "left.gz").stat().st_size,
        )

    plain = told_by(sys.executable)
    assert (
        plain[0] == 3 and plain[1].splitlines()[1:] == ["thread __main__", "at exit"] and plain[3] == "not yet flushed"
    )
    assert told_by(*PROBE) == plain
    assert told_by(*PROBE, run=tmp_path / "run") == plain
    told = Told(tmp_path / "run")
    assert told.of("end")[0]["exit_code"] == 3 and told.of("error")[0]["type"] == "SystemExit"


ENDS = {
    "raise SystemExit('no data')": (1, "no data\n", "SystemExit"),
    "raise KeyboardInterrupt": (130, "KeyboardInterrupt", None),
    "def broken(:": (1, "SyntaxError", "SyntaxError"),
    "import ctypes, os\nabort = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p)(lambda *_: os.abort())\n"
    "ctypes.CDLL(None).on_exit(abort, None)": (
        0,
        "",
        None,
    ),  # a library that aborts while the process is torn down
}


@pytest.mark.skipif(sys.platform != "linux", reason="on_exit is glibc's")
@pytest.mark.parametrize("source", ENDS)
def test_exit_codes(tmp_path, source):
    code, said, error = ENDS[source]
    script = tmp_path / "a script.py"
    script.write_text(source + "\n")
    done, told = watched(script)
    stderr = done.logs(0, "stderr")
    failures = {0: code} if code else {}
    seen = done.state.status.failures
    assert {rank: failure.exit_code for rank, failure in seen.items()} == failures, "as torchrun saw it"
    assert "labkit" not in stderr, stderr
    assert said in stderr
    assert [event["type"] for event in told.of("error")] == ([error] if error else [])
    assert told.of("end")[0]["exit_code"] == code


def test_a_script_that_is_not_there(tmp_path):
    done = launch([*PROBE, tmp_path / "none.py"], None)
    assert done.returncode == 2 and "can't open file" in done.stderr and "Traceback" not in done.stderr
    assert "usage" in launch(PROBE, None).stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the promise is the kernel's, on Linux")
def test_a_rank_dies_with_its_launcher(tmp_path, runs):
    run = runs / "orphan"
    script = tmp_path / "waits.py"
    script.write_text("import time\nprint('waiting', flush=True)\ntime.sleep(120)\n")
    launcher = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); time.sleep(120)"
    argv = [sys.executable, "-c", launcher, *PROBE, str(script)]
    agent = subprocess.Popen(argv, env=environment(run), stdout=subprocess.PIPE)
    agent.stdout.readline()
    assert len(processes_of(str(run))) == 2
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    wait_until(lambda: not processes_of(str(run)), 10)
    agent.stdout.close()
