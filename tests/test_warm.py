"""Warm starts: scripts behave the same, a run starts cold if they could not, and the server leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import PATIENCE, processes_of, server_is_ready, wait_until

import labkit
from labkit.cli import parser as cli
from labkit.cli.commands import act
from labkit.common.processes import is_supervisor
from labkit.frontends.doctor.machine import warm_start
from labkit.frontends.panel import Lab
from labkit.launch import local
from labkit.launch.job import Job
from labkit.launch.warm import client, facts, fork, wire
from labkit.launch.warm.client import Cold
from labkit.runs.handle import Run, run

SEES = Path(__file__).parent / "scripts" / "sees.py"
CLONE = Path(labkit.__file__).parents[1]
OF_ONE_RUN = {
    "LABKIT_CLOCK",
    "LABKIT_COLD",
    "LABKIT_RUN_DIR",
    "MASTER_PORT",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_RUN_ID",
}
ENDS = "print('done')\n"


@pytest.fixture
def patient(monkeypatch):
    """Raises the server's answer timeout, for a busy machine."""
    monkeypatch.setattr(client, "ANSWER", PATIENCE)


@pytest.fixture
def server(warm_server, patient) -> dict:
    """The server of this process, which forks the runs of the test."""
    return warm_server()


@pytest.fixture
def place(tmp_path_factory, monkeypatch) -> Path:
    """A separate folder for the sockets of this test; a server that it starts there is stopped."""
    folder = Path(f"/tmp/labkit-test-{os.getpid()}-{time.monotonic_ns()}")  # a socket's path must be short
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder
    for process in psutil.process_iter(["environ"]):
        if (process.info["environ"] or {}).get("XDG_RUNTIME_DIR") == str(folder):
            process.kill()
    found = client.about()
    if isinstance(found, dict):
        psutil.Process(found["pid"]).kill()
    subprocess.run(["rm", "-r", str(folder)], check=True)


@pytest.fixture
def ends(tmp_path) -> Path:
    path = tmp_path / "ends.py"
    path.write_text(ENDS)
    return path


def started(path: Path, **fields: object) -> Run:
    """A finished run of a script on one rank."""
    handle = run(path, **{"nproc": 1, "device": "cpu"} | fields).wait(120)
    assert handle.words == "finished", handle.logs(0, "stderr")
    return handle


def how(handle: Run) -> tuple[str, str]:
    status = handle.state.status
    return status["start"], status["cold_because"]


# ---- a script cannot tell the difference


@pytest.fixture(scope="module")
def seen(warm_server, tmp_path_factory):
    """The environment that each of two ranks observes, by kind of start."""
    warm_server()
    before = client.ANSWER
    client.ANSWER = PATIENCE
    told = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_RUNS", str(tmp_path_factory.mktemp("runs")))
        patch.chdir(SEES.parent)
        for cold in (False, True):
            handle = run("sees.py", nproc=2, device="cpu", args=["one", "two words"], cold=cold).wait(240)
            assert handle.words == "finished", handle.logs(0, "stderr")
            start = handle.state.status["start"]
            told[start] = [json.loads(handle.logs(rank).splitlines()[-1]) for rank in (0, 1)]
            for one in told[start]:
                folder = str(handle.folder.path)
                one["same"] = json.loads(json.dumps(one["same"]).replace(folder, "RUN"))
                for name in OF_ONE_RUN:
                    one["same"]["environ"].pop(name, None)
    client.ANSWER = before
    assert told.keys() == {"warm", "cold"}
    return told


ASPECTS = (
    *(
        "environ",
        "argv",
        "path",
        "file",
        "cwd",
        "main",
        "flags",
        "orig_argv",
        "threads",
        "signals",
        "blocked",
        "descriptors",
    ),
    *(
        "streams",
        "session",
        "start methods",
        "children",
        "workers",
        "umask",
        "limits",
        "name",
        "tempdir",
        "logging",
        "hooks",
        "zone",
    ),
    "recursion",
)


@pytest.mark.parametrize("aspect", ASPECTS)
def test_a_script_sees_the_same(aspect, seen):
    for warm, cold in zip(seen["warm"], seen["cold"]):
        assert warm["same"][aspect] == cold["same"][aspect]


def test_every_aspect_is_compared(seen):
    assert set(ASPECTS) == seen["warm"][0]["same"].keys() == seen["cold"][0]["same"].keys()


def test_ranks_draw_different_random_numbers_and_keys(seen):
    chance = [value for one in seen["warm"] for value in (*one["own"]["chance"], one["own"]["key"])]
    assert len(set(chance)) == 8


@pytest.mark.parametrize("fields", [{"strategy": "ddp", "workload": "cnn"}, {"strategy": "fsdp2", "workload": "gpt"}])
def test_losses_are_bit_identical(fields, server):
    losses = []
    for cold in (False, True):
        handle = run(
            fields["strategy"],
            workload=fields["workload"],
            nproc=2,
            device="cpu",
            steps=4,
            batch_size=8,
            samples=256,
            cold=cold,
        )
        handle.wait(240)
        assert handle.words == "finished"
        assert how(handle)[0] == ("cold" if cold else "warm")
        losses.append([handle.state.ranks[rank].steps.loss[:].tolist() for rank in (0, 1)])
        assert len(losses[-1][0]) == 4
    assert losses[0] == losses[1]


def test_a_restarted_rank_is_forked_again(server, tmp_path):
    path = tmp_path / "fails_once.py"
    path.write_text(
        "import os, sys\nattempt = os.environ['TORCHELASTIC_RESTART_COUNT']\nprint('attempt',"
        " attempt)\nsys.exit(attempt == '0')\n"
    )
    handle = started(path, nproc=2, max_restarts=1)
    assert how(handle) == ("warm", "") and handle.state.status["restarts"] == 1
    assert [handle.logs(rank).splitlines()[-1] for rank in (0, 1)] == ["attempt 1"] * 2


def test_files_that_a_script_leaves_open_are_written_whole(server, tmp_path):
    """The script can use descriptor numbers that the launcher had used."""
    path = tmp_path / "leaves_open.py"
    path.write_text(
        "files = [open(f'{__file__}.{number}', 'w') for number in range(40)]\n"
        "for number, file in enumerate(files):\n    file.write(f'{number}\\n' * 10)\n"
    )
    started(path)
    assert [Path(f"{path}.{number}").read_text() for number in range(40)] == [
        f"{number}\n" * 10 for number in range(40)
    ]


def test_the_processes_of_a_run_have_its_tag_and_their_own_commands(server, tmp_path):
    path = tmp_path / "waits.py"
    path.write_text("import time\nprint('waits', flush=True)\ntime.sleep(100)\n")
    handle = run(path, nproc=2, device="cpu")
    wait_until(lambda: handle.state.over or all("waits" in handle.logs(rank) for rank in (0, 1)))
    assert how(handle) == ("warm", "")
    processes = processes_of(str(handle.folder.path))
    commands = [" ".join(process.cmdline()) for process in processes]
    assert len(processes) == 4 and len(list(filter(is_supervisor, processes))) == 1
    assert sum(" -m torch.distributed.run " in command for command in commands) == 1
    assert sum(" -u -m labkit.probe " in command for command in commands) == 2
    assert psutil.Process(server["pid"]).cmdline()[1:] == ["-m", "labkit.launch.warm.server"]
    handle.stop()
    assert processes_of(str(handle.folder.path)) == []


# ---- where a run is cold


@pytest.mark.parametrize(
    "name", ["TORCH_LOGS", "OMP_NUM_THREADS", "PYTHONHASHSEED", "LD_PRELOAD", "MKL_NUM_THREADS", "LC_ALL"]
)
def test_a_variable_that_is_read_early_makes_it_cold(name, server, monkeypatch):
    for common, value in client.local.standing_environment().items():
        monkeypatch.setenv(common, value)
    monkeypatch.setenv(
        name, {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "LD_PRELOAD": "", "LC_ALL": "C"}.get(name, "1")
    )
    found = client.consent(os.environ, [])
    assert isinstance(found, Cold) and f"the environment variable {name}" in found.reason


@pytest.mark.parametrize("name", ["LABKIT_RUNS", "RANK", "HOME_OF_MY_DATA", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG"])
def test_any_other_variable_leaves_it_warm(name, server):
    found = client.consent(client.local.standing_environment() | {name: "x"}, [])
    assert not isinstance(found, Cold), found
    found._connection.close()


def test_limits_of_the_process_are_inherited_as_under_a_cold_start(server):
    code = (
        "import os, resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))\n"
        "from labkit.launch.warm import client; client.ANSWER = 60\n"
        "print(client.consent(client.local.standing_environment(), []).reason)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=CLONE)
    assert done.stdout == "the warm server differs in the limits of the process\n"


def test_signals_that_the_supervisor_sets_anew_may_be_ignored_and_others_may_not(server):
    """A notebook's kernel ignores SIGINT between two cells."""
    told = []
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        before = signal.signal(number, signal.SIG_IGN)
        try:
            told.append(client.facts(os.environ)["the signals that are ignored"])
        finally:
            signal.signal(number, before)
    nothing = client.facts(os.environ)["the signals that are ignored"]
    assert told == [nothing, nothing, nothing | 1 << signal.SIGUSR1 - 1]


def test_a_module_beside_the_script_that_shadows_a_loaded_one_makes_it_cold(server, ends):
    (ends.parent / "numpy.py").write_text("x = 1\n")
    handle = started(ends)
    assert how(handle) == (
        "cold",
        f"the warm server has already imported a different module than {ends.parent / 'numpy.py'}",
    )


@pytest.mark.parametrize("name", ["torch.txt", "torch", "unknown.py", "labkit.md"])
def test_what_is_no_module_shadows_none(name, tmp_path):
    path = tmp_path / name
    path.mkdir() if name == "torch" else path.touch()
    assert facts.shadowing({str(tmp_path)}) == ""


def test_the_clone_itself_shadows_nothing():
    assert facts.shadowing({str(CLONE)}) == ""


def test_another_version_starts_cold_and_says_so(server, ends, monkeypatch):
    monkeypatch.setattr(facts, "_labkit", lambda: "another")
    handle = started(ends)
    assert how(handle) == ("cold", "the warm server differs in the version of labkit")
    assert "The run started cold: the warm server differs in the version of labkit." in handle.state.note


def test_torch_that_changed_on_disk_starts_cold(server, monkeypatch):
    changed = facts._changed
    monkeypatch.setattr(facts, "_changed", lambda place: changed(place) + place.endswith("torch/__init__.py"))
    assert (
        client.consent(client.local.standing_environment(), []).reason
        == "the warm server differs in the installed packages"
    )


def test_other_systems_start_cold(monkeypatch):
    monkeypatch.setattr(client, "_AVAILABLE", False)
    assert client.consent({}, []) == client.about() == Cold()


def test_cold_can_be_asked_for(server, ends, monkeypatch):
    assert how(started(ends, cold=True)) == ("cold", "")
    assert started(ends).summary()["start"] == "warm"
    with monkeypatch.context() as patch:
        patch.setenv(client.FORCE_COLD, "1")
        assert how(started(ends)) == ("cold", "")
    asked = []
    monkeypatch.setattr(Job, "start", classmethod(lambda cls, spec, **how: asked.append(how["cold"]) or 1 / 0))
    Lab(cold=True)._launch(None)
    for more in ([], ["--cold"]):
        with pytest.raises(ZeroDivisionError):
            act(cli.parse(["run", str(ends), "--nproc", "1", "--device", "cpu", *more]))
    assert asked == [True, False, True]


def test_a_process_that_has_a_gpu_open_is_known(tmp_path, monkeypatch):
    assert not fork.has_gpu_open()
    monkeypatch.setattr(Path, "readlink", lambda path: Path("/dev/nvidiactl"))
    assert fork.has_gpu_open()


# ---- servers that fail


def test_a_server_that_hangs_is_not_waited_for_and_starts_nothing_later(warm_server, ends, monkeypatch):
    process = psutil.Process(warm_server()["pid"])
    process.suspend()
    try:
        handle = run(ends, nproc=1, device="cpu")
    finally:
        process.resume()
    handle.wait(120)
    assert handle.words == "finished" and how(handle) == (
        "cold",
        "the warm server did not respond: no answer within 0.3 s",
    )
    assert "started cold" in handle.state.note
    before = warm_server()["runs"]
    time.sleep(0.5)  # the server now receives the message sent while it was suspended
    assert warm_server()["runs"] == before
    assert handle.logs(0) == "done\n"


def test_a_start_that_nobody_waits_for_any_more_is_dropped(warm_server, runs, tmp_path, patient):
    before = warm_server()
    process = psutil.Process(before["pid"])
    given = client.consent(client.local.standing_environment(), [])
    assert isinstance(given, client.Consent)
    process.suspend()
    try:
        how = wire.as_file({"run_dir": str(tmp_path), "started": "0.0", "environment": {}})
        wire.send(given._connection, {"ask": "start"}, [how, how, how])
        given._connection.close()
        os.close(how)
    finally:
        process.resume()
    assert warm_server()["runs"] == before["runs"] and process.children() == []


def test_a_server_that_was_killed_is_told_of_once_and_replaced(place, ends, monkeypatch, patient):
    client.prepare()
    found = server_is_ready()
    os.kill(found["pid"], signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(found["pid"]))
    handle = started(ends)
    assert how(handle) == ("cold", "the warm server has ended")
    again = server_is_ready()
    assert again["pid"] != found["pid"]
    assert how(started(ends)) == ("warm", "")


def test_a_server_that_dies_between_yes_and_start_costs_nothing(place, ends, monkeypatch, patient):
    client.prepare()
    found = server_is_ready()
    monkeypatch.setattr(client.Consent, "start", _killing(found["pid"], client.Consent.start))
    handle = started(ends)
    start, because = how(handle)
    assert start == "cold" and because.startswith("the warm server did not start the run: ")


def _killing(pid: int, start):
    def killed(self, *args):
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE if psutil.pid_exists(pid) else True)
        return start(self, *args)

    return killed


def test_a_folder_with_wrong_permissions_is_not_used(place, ends):
    wire.address().parent.mkdir(mode=0o755)
    wire.address().parent.chmod(0o755)
    start, because = how(started(ends))
    folder = wire.address().parent
    assert (
        start == "cold"
        and because == f"the warm server cannot be used: {folder} must be a folder of this user with mode 0700"
    )
    assert warm_start().level == "degraded" and "cannot be used" in warm_start().says


def test_a_server_that_refused_to_serve_is_named_with_the_reason(place, ends, monkeypatch, tmp_path):
    """A library whose import starts a thread: a process with threads must not fork."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, threading\nif 'labkit.launch.warm.server' in sys.orig_argv:\n"
        "    threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    client._start_server(local.standing_environment())  # returns when the server has ended
    reason = client.about().reason
    assert reason.startswith("the warm server refused to serve (process ")
    assert reason.endswith(f" of {sys.executable}): it must have one thread, but its imports started 1 more")
    check = warm_start()
    assert (check.level, check.says) == ("degraded", reason)
    assert how(started(ends)) == ("cold", reason)


def test_a_socket_of_another_user_is_rejected(place, monkeypatch):
    wire.address().parent.mkdir(mode=0o700)
    with wire.endpoint() as listener:
        listener.bind(str(wire.address()))
        listener.listen()
        monkeypatch.setattr(wire, "_PEER", _of_user(os.getuid() + 1))
        found = client.consent(os.environ, [])
        assert isinstance(found, Cold) and "belongs to another user" in found.reason


def _of_user(uid: int):
    class Peer:
        size = 12

        @staticmethod
        def unpack(data: bytes) -> tuple[int, int, int]:
            return 4321, uid, uid

    return Peer


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"x",
        b"[]",
        b"{}",
        b'{"ask": 1}',
        b'{"ask": "start"}',
        b'{"ask": "consent"}',
        b'{"ask": "want", "facts": 3}',
    ],
)
def test_what_is_no_message_does_the_server_no_harm(message, server):
    with wire.endpoint() as connection:
        connection.connect(str(wire.address()))
        connection.send(message)
        connection.settimeout(PATIENCE)
        assert connection.recv(100) == b""  # the server closed the connection
    assert client.about()["pid"] == server["pid"]


def test_a_run_goes_on_when_the_server_that_forked_it_is_killed(place, tmp_path, patient):
    client.prepare()
    found = server_is_ready()
    path = tmp_path / "waits.py"
    path.write_text(
        "import pathlib, time\nprint('waits', flush=True)\nwhile not pathlib.Path(f'{__file__}.go').exists():\n   "
        " time.sleep(0.05)\n"
    )
    handle = run(path, nproc=2, device="cpu")
    wait_until(lambda: handle.state.over or all("waits" in handle.logs(rank) for rank in (0, 1)))
    os.kill(found["pid"], signal.SIGKILL)
    Path(f"{path}.go").touch()
    assert handle.wait(60).words == "finished" and how(handle) == ("warm", "")


# ---- the server's own life


def test_a_server_ends_with_all_who_wanted_it(place, patient, monkeypatch):
    # otherwise this process would also request the server, for the run of an earlier test
    monkeypatch.setattr("labkit.runs.handle.prepare", lambda: None)
    code = (
        "import sys; from labkit.launch.warm import client; client.ANSWER = 60; client.prepare(); print(1, flush=True);"
        " sys.stdin.read()"
    )
    first = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=CLONE)
    found = server_is_ready()
    second = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=CLONE)
    second.stdout.readline()
    process = psutil.Process(found["pid"])
    time.sleep(2.0)
    first.kill()
    first.wait()
    time.sleep(2.5)
    assert process.is_running() and client.about()["pid"] == found["pid"]
    second.kill()
    second.wait()
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    assert list(wire.address().parent.glob("*.socket")) == []


def test_an_idle_server_ends(place, patient, monkeypatch):
    monkeypatch.setattr(client, "IDLE", 0.5)
    client._prepare()  # returns when it has ended
    assert client.about() == Cold()


def test_a_server_that_fits_no_more_is_replaced(place, patient, monkeypatch):
    client.prepare()
    found = server_is_ready()
    monkeypatch.setenv("TORCH_SHOW_CPP_STACKTRACES", "1")
    client.prepare()
    other = server_is_ready(other_than=found["pid"])
    assert "TORCH_SHOW_CPP_STACKTRACES" in os.environ and other["runs"] == 0


def test_importing_labkit_starts_nothing(place):
    code = "import labkit, labkit.api, labkit.frontends.panel, labkit.frontends.magic, time; time.sleep(1)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=CLONE)
    assert list(place.iterdir()) == []


def test_a_server_has_one_thread_and_little_memory(server):
    process = psutil.Process(server["pid"])
    assert process.num_threads() == 1
    assert process.memory_info().rss < 400 << 20
    mode = wire.address().parent.stat().st_mode & 0o777
    assert mode == 0o700 and process.net_connections(kind="inet") == []
    assert warm_start().level == "fine" and str(server["pid"]) in warm_start().says


def least_held(process: psutil.Process) -> tuple[int, int]:
    """The minimum of descriptors and threads within a second: answering a message briefly needs a connection."""
    seen = []
    for _ in range(20):
        seen.append((process.num_fds(), process.num_threads()))
        time.sleep(0.05)
    return min(fds for fds, _ in seen), min(threads for _, threads in seen)


def test_runs_leave_nothing_in_the_server(server, ends):
    process = psutil.Process(server["pid"])
    started(ends)
    before = least_held(process)
    memory = process.memory_info().rss
    for _ in range(3):
        assert how(started(ends)) == ("warm", "")
    assert least_held(process) == before
    assert process.memory_info().rss - memory < 5 << 20
    wait_until(lambda: not process.children())
