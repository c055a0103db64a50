"""What the probe relies on in torch: without one private name, one part of the probe is lost, and it is said which."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from places import SCRIPTS
from probed import Told, environment

import labkit
from labkit.prediction.tracing import torch_private as traces
from labkit.probe import torch_private
from labkit.probe.journal import Journal
from labkit.probe.memory import Snapshots
from labkit.probe.sampler import LogLevel
from labkit.probe.torch_private import MissingName, Private

ROWS = {name: row for name, row in vars(torch_private).items() if isinstance(row, Private)}
STYLES = {name: "fsdp" for name in ROWS if name.startswith(("FSDP", "FLAT"))} | {"SHARD_OFFSET": "dtensor"}
# classes of which only instances have the attributes
OF_INSTANCES = ("graph.Node", "profiler.profile", "FlatParameter", "FullyShardedDataParallel", "SubprocessHandler")
OLD = os.environ.get("LABKIT_OLD_TORCH", "")  # an interpreter with torch 2.6, and numpy


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def is_here(row: Private, version: str) -> bool:
    return number(row.since) <= number(version) and (not row.until or number(row.until) >= number(version))


def lost_already(version: str) -> set[str]:
    """Parts that a version of torch is too old for."""
    return set() if is_here(torch_private.FLIGHT_RECORDER, version) else {"collectives"}


def used(version: str) -> list[str]:
    """Rows that `every_part.py` needs on a CPU."""
    without = {"short rendezvous", "snapshots", "warm starts"} | lost_already(version)
    here = {name: row for name, row in ROWS.items() if is_here(row, version) and row is not torch_private.NCCL_RECORDER}
    return sorted(name for name, row in here.items() if row.part not in without)


class Runs:
    """`every_part.py` without each row, and without none (an empty name), with one interpreter."""

    def __init__(self, folder: Path, python: str, version: str):
        self.folder, self.version = folder, version
        every = [(name, STYLES.get(name, "ddp")) for name in used(version)]
        every += [("", style) for style in ("ddp", "fsdp", "dtensor")]
        argv = [python, SCRIPTS / "without.py", folder, *(f"{name}:{style}" for name, style in every)]
        done = subprocess.run(argv, env=environment(None), capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr

    def check(self, name: str, style: str) -> None:
        """Exactly the part of the row is lost, besides those that this torch is too old for."""
        run = self.folder / f"{name}-{style}"
        told, output = Told(run), Path(f"{run}.txt").read_text()
        assert told.of("end")[0]["exit_code"] == 0, output
        assert "Traceback" not in output
        lost = lost_already(self.version) | ({ROWS[name].part} if name else set())
        errors = {event["part"]: event for event in told.of("probe_error")}
        assert set(errors) == lost and len(told.of("probe_error")) == len(lost), output
        for part, event in errors.items():
            assert event["type"] == "MissingName" and event["message"].endswith(torch_private.LOST[part])
        if name:
            row = ROWS[name]
            named = [f"{row.name}_renamed"]
            if row.until:  # newer versions have something else instead, which is then looked for
                named = [other.name for other in ROWS.values() if other.part == row.part and other is not row]
            said = errors[row.part]["message"]
            assert any(said.startswith(f"torch {self.version} has no {one}: ") for one in named)
        found = recorded(told, run)
        missing = {part for part, is_there in found.items() if not is_there}
        assert missing == lost_with(lost, style) & set(found), output


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("without"), sys.executable, torch.__version__)


def recorded(told: Told, folder: Path) -> dict[str, bool]:
    """Whether each part of the probe has recorded its results."""
    steps = told.of("step")
    true = [event["value"] for event in told.of("metric")]
    return {
        "metrics": len(true) == len(steps) == 10,
        "steps": all(step["seconds"]["backward"] > 0 and step["samples"] == 16 for step in steps),
        "data loading": all(step["seconds"]["data"] > 0 for step in steps),
        "loss shares": [step["loss"] for step in steps] == pytest.approx(true),
        "timelines": bool(told.of("timeline")),
        "memory curves": bool(told.of("memory_step")),
        "bucket sizes": told.of("memory")[-1]["owners"]["communication"] > 0,
        "collectives": any("all_reduce" in event["ops"] for event in told.of("traffic")),
        "saved files": any(event["what"] == "save" for event in told.of("saw")),
        "tensors": sorted(path.name for path in folder.glob("tensors/*"))
        == ["rank0-gradients.npz", "rank0-parameters.npz"],
    }


def lost_with(lost: set[str], style: str) -> set[str]:
    """The parts without results in a run of this style if some parts are lost."""
    never = {"ddp": set(), "fsdp": {"bucket sizes"}, "dtensor": {"bucket sizes", "collectives"}}
    return lost | ({"memory curves"} if "timelines" in lost else set()) | never[style]


@pytest.mark.parametrize("style", ["ddp", "fsdp", "dtensor"])
def test_every_part_records_something_if_nothing_is_missing(without, style):
    without.check("", style)


@pytest.mark.parametrize("name", used(torch.__version__))
def test_without_one_private_name_one_part_is_lost_and_the_rest_continues(without, name):
    without.check(name, STYLES.get(name, "ddp"))


@pytest.mark.slow
@pytest.mark.skipif(not OLD, reason="LABKIT_OLD_TORCH names no interpreter with torch 2.6")
def test_the_same_holds_with_the_oldest_torch(tmp_path):
    asked = subprocess.run([OLD, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True)
    version = asked.stdout.strip()
    assert number(version) == (2, 6), asked.stderr
    runs = Runs(tmp_path, OLD, version)
    for name, style in [*((name, STYLES.get(name, "ddp")) for name in used(version)), ("", "ddp"), ("", "dtensor")]:
        runs.check(name, style)


@pytest.mark.parametrize("name", sorted(ROWS))
def test_the_table_tells_which_versions_of_torch_have_a_name(name):
    row = ROWS[name]
    assert row.part in torch_private.LOST
    assert number(row.since) >= number("2.6") and (not row.until or number(row.until) >= number(row.since))
    if row is torch_private.LOG_LEVEL:
        if sys.platform == "linux":
            LogLevel()
    elif row.owner.endswith(OF_INSTANCES):
        torch_private.find(row.owner, row.part)  # only instances have the attribute
    else:
        is_built = row is not torch_private.NCCL_RECORDER or torch.distributed.is_nccl_available()
        assert row.exists() == (is_here(row, torch.__version__) and is_built)


@pytest.mark.parametrize("name", ["RECORD_HISTORY", "DUMP_SNAPSHOT"])
def test_without_the_allocators_record_only_snapshots_are_lost(tmp_path, monkeypatch, name):
    monkeypatch.setitem(ROWS[name].__dict__, "name", f"{ROWS[name].name}_renamed")
    snapshots = Snapshots(Journal(tmp_path, 0), tmp_path)
    snapshots.begin()
    snapshots.end(3)
    (event,) = Told(tmp_path).of("probe_error")
    assert event["part"] == "snapshots" and f"{name.lower()}"[-8:] in event["message"]
    assert not (tmp_path / "snapshots").exists()


def test_a_warm_server_that_cannot_replace_the_start_of_a_process_says_so():
    program = (
        "from labkit.probe import torch_private as names\n"
        "object.__setattr__(names.START_PROCESS, 'name', names.START_PROCESS.name + '_renamed')\n"
        "import labkit.launch.warm.fork\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment(None), capture_output=True, text=True)
    said = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "SubprocessHandler._popen_renamed: runs start cold" in said


def test_names_that_are_found_are_told_from_functions_of_the_same_name():
    assert torch_private.find("torch.distributed.rendezvous.TCPStore", "stores") is torch.distributed.TCPStore
    with pytest.raises(MissingName, match=r"torch .* has no torch\.nn\.Nothing: .* not recorded"):
        torch_private.find("torch.nn.Nothing", "metrics")


def private_names(source: str) -> set[str]:
    """Private names of torch in a source text: `torch._x`, `torch.x._y`, and strings with such dotted names."""
    names = set(re.findall(r"\btorch(?:\.\w+)*\._(?!_)\w+", source))
    return names | set(re.findall(r"from torch[\w.]*\._\w+ import|from torch[\w.]* import \(?[^)\n]*\b_\w+", source))


def test_only_one_module_knows_private_names_of_torch():
    root = Path(labkit.__file__).parent
    rows = [*ROWS.values(), *traces.REQUIRED, *traces.OPTIONAL, traces.SCHEMA]
    attributes = {row.attribute for row in rows if row.attribute.startswith("_")} - {"__next__"}
    for folder in ("probe", "launch", "prediction"):
        for path in sorted((root / folder).rglob("*.py")):
            if path.name == "torch_private.py":
                continue
            source = path.read_text(encoding="utf-8")
            assert private_names(source) == set(), path
            used = {name for name in attributes if re.search(rf"(?<!self)[.\"']{name}\b", source)}
            assert used == set(), path


# ---- predictions


@pytest.mark.parametrize("row", traces.REQUIRED, ids=lambda row: row.attribute)
def test_this_torch_has_every_name_that_a_trace_needs(row):
    assert row.exists()
    assert row.part in torch_private.LOST


def test_without_a_name_there_is_no_trace_and_it_is_said_why_and_some_are_not_needed():
    names = {name for name, row in vars(traces).items() if row in traces.REQUIRED}
    optional = {name for name, row in vars(traces).items() if row in traces.OPTIONAL}
    argv = [sys.executable, SCRIPTS / "without_traced.py", *sorted(names | optional)]
    done = subprocess.run(argv, env=environment(None), capture_output=True, text=True, timeout=600)
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert set(said) == names | optional, done.stderr
    for name in names:
        missing = (
            f"torch {torch.__version__} has no {getattr(traces, name).name}_renamed: {torch_private.LOST['traces']}"
        )
        assert said[name] == missing
    assert {said[name] for name in optional} == {"traced"}
