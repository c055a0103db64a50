"""The session on GPUs without one: what it plans, its limits, its report, and refusals."""

from __future__ import annotations

import subprocess
import sys
import time
import zipfile
from types import SimpleNamespace

import psutil
import pytest
from bench.pairs import Times
from gpu_session import __main__ as session
from gpu_session import parts
from gpu_session.measure import Outcome, OutOfTime, Session, pack, possible
from gpu_session.report import IMPOSSIBLE, OK, WRONG, Report

from labkit.plan.spec import Spec
from labkit.record.folder import RunFolder
from labkit.setup import environment, preflight
from labkit.setup.machine import Gpu, Machine
from labkit.training.strategies import STRATEGIES


def gpus(count: int) -> Machine:
    each = (Gpu(index, "NVIDIA H100 80GB HBM3", 80 << 30, (9, 0), f"GPU-{index}") for index in range(count))
    return Machine(tuple(each), cores=16, memory=1 << 38, torch=(2, 13), cuda="13.0")


@pytest.fixture
def on(monkeypatch):
    """Makes this machine one with some GPUs."""

    def become(count: int) -> Machine:
        monkeypatch.setattr(Machine, "here", classmethod(lambda cls: gpus(count)))
        return gpus(count)

    return become


def ok(says: str = "") -> Outcome:
    return Outcome(OK, says)


# ---- cases


def test_a_case_that_raises_stops_no_other(tmp_path):
    def raises():
        raise ValueError("no such thing")

    assert Session(tmp_path, "warm", time.time() + 60).execute({"first": raises, "second": ok, "third": "needs more"})
    cases = Report(tmp_path).cases()
    verdicts = [(case, line["verdict"]) for (_, case), line in cases.items()]
    assert verdicts == [("first", WRONG), ("second", OK), ("third", IMPOSSIBLE)]
    assert cases["warm", "first"]["says"] == "ValueError: no such thing"
    assert "in raises" in cases["warm", "first"]["figures"]["traceback"]


def test_a_case_without_enough_time_is_not_reached_and_a_later_session_does_it(tmp_path):
    def late():
        raise OutOfTime

    report = Report(tmp_path)
    assert not Session(tmp_path, "warm", time.time() + 60).execute({"first": ok, "second": late, "third": ok})
    assert report.not_reached(["warm", "faults"]) == {"warm": ["second", "third"], "faults": ["faults"]}
    assert not Session(tmp_path, "warm", time.time() + 1).execute({"first": ok, "second": ok, "third": ok})
    assert len(report.cases()) == 1
    done = []
    cases = {name: lambda name=name: done.append(name) or ok() for name in ("first", "second", "third")}
    assert Session(tmp_path, "warm", time.time() + 60).execute(cases)
    assert done == ["second", "third"] and not report.not_reached(["warm"])


def test_some_cases_are_chosen_by_the_beginnings_of_their_names(tmp_path):
    cases = dict.fromkeys(("ddp, gpt", "dp", "single, gpt"), ok)
    assert Session(tmp_path, "strategies", time.time() + 60).execute(cases, ("ddp", "single"))
    assert [case for _, case in Report(tmp_path).cases()] == ["ddp, gpt", "single, gpt"]


# ---- what is planned


def test_all_strategies_run_on_eight_gpus_and_on_fewer_what_can(on, monkeypatch):
    monkeypatch.setattr(preflight, "installed", lambda name, needs: None)
    ranks = {count: {name: possible(on(count), name) for name in STRATEGIES} for count in (1, 2, 8)}
    assert not [spec for count in (2, 8) for spec in ranks[count].values() if isinstance(spec, str)]
    assert ranks[8]["fsdp2"].nproc == 8 and ranks[8]["single"].nproc == 1 and ranks[2]["tp"].nproc == 2
    refused = {name: spec for name, spec in ranks[1].items() if isinstance(spec, str)}
    assert set(refused) == {"dp", "pp", "pp_ddp", "pp_fsdp2_tp"}
    assert all("; use --nproc" in reason for reason in refused.values())
    assert all(spec.nproc == 1 for spec in ranks[1].values() if isinstance(spec, Spec))
    batches = {spec.global_batch for spec in ranks[8].values()}
    assert batches == {16}  # one training, so that losses can be compared


@pytest.mark.parametrize("count", [1, 2, 8])
def test_every_part_has_cases_and_says_what_is_missing(on, monkeypatch, tmp_path, count):
    on(count)
    monkeypatch.setattr(preflight, "installed", lambda name, needs: None)
    own = Session(tmp_path, "strategies", time.time() + 60)
    planned = {name: part.cases(own) for name, part in parts.PARTS.items()}
    assert all(planned.values())
    assert next(iter(planned["strategies"])) == "single, gpt × 1"
    assert planned["strategies"].keys() >= {"single, moe × 1", f"ep, moe × {count}"}
    assert isinstance(planned["faults"]["killed_rank"], str) == (count == 1)
    assert isinstance(planned["bandwidth"]["NCCL × 2"], str) == (count == 1)
    assert callable(planned["faults"]["out_of_memory"])
    assert callable(planned["options"]["fsdp2, prefetch=2"]) and callable(planned["options"]["ddp, accumulate=2"])


def test_pairs_are_known_one_by_one_and_judged_together(on, monkeypatch, tmp_path):
    on(1)
    times = {"lab": 1.02, "bare": 1.0}

    def each_pair(sides, nproc, pairs):
        assert (list(sides), nproc) == (["lab", "bare"], 1)
        for slower in (1.0, 1.5, 1.0):
            yield tuple(Times(times[side], times[side] * slower, 0, 0, 0, 0) for side in sides)

    monkeypatch.setattr(parts, "each_pair", each_pair)
    own = Session(tmp_path, "overhead", time.time() + 600)
    assert own.execute(parts.overhead(own), ("ddp, gpt",))
    known = Report(tmp_path).cases()
    assert [line["verdict"] for line in known.values()] == ["measured"] * 3 + [OK]
    assert known["overhead", "ddp, gpt"]["figures"] == pytest.approx({"median": 1.02, "mean": 1.02, "seconds": 1.0})
    assert "mean 1.020, of 1,000 ms, 3 pairs" in known["overhead", "ddp, gpt"]["says"]


def test_parts_run_in_their_order_whatever_is_named_first():
    chosen = session._chosen("warm;strategies/fsdp2; strategies/ddp;machine", list(parts.PARTS))
    assert list(chosen.items()) == [("machine", []), ("strategies", ["fsdp2", "ddp"]), ("warm", [])]


# ---- limits


def test_parts_get_their_share_and_never_more_than_is_left(on, monkeypatch, tmp_path, capsys):
    on(1)
    now, given = [1000.0], {}
    monkeypatch.setattr(session, "time", SimpleNamespace(time=lambda: now[0], monotonic=lambda: now[0]))
    monkeypatch.setattr(preflight, "torch", lambda: preflight.Torch(version="2.13.0", cuda="13.0", available=True))

    def run_part(command, errors, limit, tick, environment):
        name = command[3]
        given[name] = limit - now[0]
        now[0] = limit + (5 if name == "strategies" else -1)
        return (None, "") if name == "strategies" else (1, "ImportError: x") if name == "warm" else (0, "")

    monkeypatch.setattr(session, "run_part", run_part)
    code = session._session(tmp_path, {name: [] for name in parts.PARTS}, began=900.0, minutes=25)
    end = 900 + 25 * 60
    assert given["machine"] == pytest.approx(25 * 60 * parts.PARTS["machine"].share)
    assert now[0] <= end - session._LATE + 5
    assert "options" not in given  # the time was over
    assert code == 1
    ends = Report(tmp_path).ends()
    assert (ends["strategies"]["how"], ends["strategies"]["says"]) == ("limit", "it did not end by itself")
    assert (ends["warm"]["how"], ends["warm"]["says"]) == ("failed", "ImportError: x")
    assert "  failed: ImportError: x; 119 s" in capsys.readouterr().out


def test_a_part_that_does_not_end_is_ended_with_its_processes(monkeypatch, tmp_path):
    monkeypatch.setattr(session, "_LATE", 0.0)
    monkeypatch.setattr(session, "_END", 0.5)
    code = (
        "import signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True, file=open(sys.argv[1], 'w'))\ntime.sleep(600)"
    )
    path, ticks = tmp_path / "pid", []

    def now() -> float:  # the limit is reached when the part has a child
        return 100.0 if path.exists() and path.read_text().strip() else 0.0

    monkeypatch.setattr(session, "time", SimpleNamespace(time=now, monotonic=time.monotonic, sleep=time.sleep))
    command = [sys.executable, "-c", code, str(path)]
    assert session.run_part(command, tmp_path / "part.err", 10.0, lambda: ticks.append(1))[0] is None
    assert ticks
    child = int(path.read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_the_last_line_of_a_part_that_fails_is_known(tmp_path):
    command = [sys.executable, "-c", "raise ValueError('no driver')"]
    assert session.run_part(command, tmp_path / "part.err", time.time() + 60) == (1, "ValueError: no driver")


# ---- the report


def test_the_page_has_what_is_wrong_first_and_what_was_not_reached(tmp_path):
    report = Report(tmp_path)
    report.add("session", began=0.0, minutes=25, machine="1 × NVIDIA H100", software="torch 2.13")
    report.add("part", part="strategies", cases=["single", "ddp", "fsdp2"])
    for case, verdict, says in (("single", OK, "the reference"), ("ddp", WRONG, "differs | at [step] <2>")):
        report.add("case", part="strategies", case=case, verdict=verdict, says=says, seconds=1.5, figures={})
    report.write_page({"strategies": "Losses", "faults": "Faults"})
    page = report.page.read_text()
    assert "2 cases: 1 ok, 1 wrong, 0 measured, 0 impossible on this machine; 2 not reached." in page
    assert r"- strategies, ddp: differs \| at \[step\] \<2\>" in page
    assert "- strategies: fsdp2\n- faults: faults" in page
    assert "| faults | Faults |  | not begun |" in page
    assert page.index("## Wrong") < page.index("## Not reached") < page.index("## Losses")


def test_a_line_that_was_cut_by_a_kill_is_no_obstacle(tmp_path):
    report = Report(tmp_path)
    report.add("case", part="warm", case="cold", verdict=OK, says="", seconds=1.0, figures={})
    with report.lines.open("a") as file:
        file.write('{"kind": "case", "part": "wa')
    report.add("case", part="warm", case="warm", verdict=OK, says="", seconds=1.0, figures={})
    assert list(report.cases()) == [("warm", "cold"), ("warm", "warm")]


def test_a_pack_is_the_run_folder_without_tensors_and_checkpoints(tmp_path):
    folder = RunFolder.create("ddp-x1", tmp_path / "runs")
    RunFolder.write_json(folder.spec, Spec("ddp", nproc=1, steps=2).to_json())
    for name in ("tensors/rank0.npz", "checkpoints/1/x", "events/rank0.jsonl"):
        path = folder.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}\n")
    (folder.path / "link").symlink_to("/etc/hostname")
    (tmp_path / "packs").mkdir()
    packed = pack(folder.path, tmp_path / "packs")
    with zipfile.ZipFile(packed) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "elsewhere")
    assert names == {f"{folder.name}/spec.json", f"{folder.name}/events/rank0.jsonl"}
    assert RunFolder.find(folder.name, tmp_path / "elsewhere").read_spec().strategy == "ddp"


# ---- refusals, and a bare machine


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "labkit", "test", "--gpu", *arguments],
        cwd=environment.CLONE,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(bool(Machine.here().gpus), reason="there is a GPU here")
def test_without_a_gpu_the_session_is_refused_in_one_sentence(tmp_path):
    done = command("--results", str(tmp_path / "results"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"labkit: the session needs a GPU, and {Machine.here().no_gpu_reason}\n"
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--only", "losses"), "--only must name parts (machine, strategies"), (("--minutes", "0"), "from 1 to 1440")],
)
def test_wrong_arguments_are_refused(arguments, said):
    done = command(*arguments)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_missing_packages_are_named_if_they_cannot_be_installed(monkeypatch):
    lacking = [environment.Requirement("ruff", "0.5"), environment.Requirement("plotly", "5.24")]
    monkeypatch.setattr(environment, "missing", lambda *extras: lacking)

    def ensure(extras, argv):
        raise environment.SetupError("pip install failed")

    monkeypatch.setattr(environment, "ensure", ensure)
    refusal = session._prepare([])
    assert refusal.startswith("ruff>=0.5 are missing") and "PIP_FIND_LINKS" in refusal
    del lacking[0]
    assert session._prepare([]) == ""  # no part needs plotly


def test_no_part_imports_what_a_bare_machine_lacks():
    code = (
        f"import sys; sys.path[:0] = ['tests']\n"
        f"for name in {session._UNUSED}: sys.modules[name] = None\n"
        "import gpu_session.parts, labkit.prediction.predict, labkit.launch.supervisor"
    )
    subprocess.run([sys.executable, "-c", code], cwd=environment.CLONE, check=True)
