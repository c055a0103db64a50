"""Real comparisons: from the command line, interrupted, with a failing run, and in a headless notebook."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import nbclient
import nbformat
import pytest
from conftest import processes_of, wait_until

from labkit import compare, show
from labkit.record.folder import RunFolder
from labkit.setup.environment import CLONE

LABKIT = [sys.executable, "-m", "labkit", "compare"]
SMALL = ["--workload", "mlp", "--nproc", "2", "--device", "cpu", "--samples", "640", "--batch-size", "64"]


def test_a_comparison_from_the_command_line(runs):
    argv = [*LABKIT, "--strategies", "ddp,tp", *SMALL, "--epochs", "1", "--json"]
    done = subprocess.run(argv, cwd=CLONE, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row["strategy"] for row in found["rows"]] == ["single", "ddp", "tp"]
    assert [row["badge"]["verdict"] for row in found["rows"]] == ["reference", "equal", "equal"]
    for row in found["rows"]:
        assert row["steps"] == 10
        assert row["seconds"] > 0
        assert row["accuracy"] == pytest.approx(found["rows"][0]["accuracy"], abs=1e-6)
        assert sum(row["phases"].values()) == pytest.approx(1)
    single, ddp, tp = found["rows"]
    assert tp["memory"] < ddp["memory"], "a part of the layers"
    assert ddp["sent"] > tp["sent"] > single["sent"] == 0
    assert found["recorded_elsewhere"]["rows"] == [], "it is of another model"
    again = subprocess.run([*LABKIT, "--json"], cwd=CLONE, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stderr
    assert [row["badge"]["verdict"] for row in json.loads(again.stdout)["rows"]] == ["reference", "equal", "equal"]


def test_ctrl_c_ends_the_run_that_is_under_way_and_the_rest_does_not_begin(runs):
    argv = [*LABKIT, "--strategies", "ddp", *SMALL, "--steps", "1000000", "--json"]
    with subprocess.Popen(argv, cwd=CLONE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: any(path.read_text() for path in runs.glob("*/events/rank0.jsonl")))
            process.send_signal(signal.SIGINT)
            out, error = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, error
    assert [row["words"] for row in json.loads(out)["rows"]] == ["stopped", "not started"]
    assert processes_of(str(runs)) == []


def test_a_run_that_fails_does_not_end_the_others(runs, monkeypatch, capsys):
    write = RunFolder.write_text

    def broken(path, text):
        write(
            path,
            (
                text.replace("dist.init_process_group(", "raise KeyError('on purpose')  # ")
                if path.name == "train.py"
                else text
            ),
        )

    monkeypatch.setattr(RunFolder, "write_text", staticmethod(broken))
    comparing = compare(["ddp", "dp"], workload="mlp", nproc=2, device="cpu", batch_size=64, samples=640, steps=3)
    assert show(comparing).wait(120).over
    single, ddp, dp = comparing.rows
    assert [row.failed for row in (single, ddp, dp)] == [False, True, False]
    assert "KeyError" in ddp.words
    assert dp.badge.verdict == "equal"
    assert len(comparing.figure().data) == 1 + 5 + 1, "no row has sent anything"
    assert "KeyError" in capsys.readouterr().out


HEADLESS = (
    (
        "from labkit import compare, show\n"
        "compare(['ddp'], workload='mlp', nproc=2, device='cpu', samples=640, batch_size=64, steps=3)"
    ),
    "show(_)",
)


def test_a_bare_comparison_where_nobody_watches_waits_for_the_end_and_leaves_plain_figures(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(CLONE))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.chdir(tmp_path)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in HEADLESS])
    nbclient.NotebookClient(notebook, timeout=240).execute()
    for cell in notebook.cells:
        (output,) = cell.outputs  # once, also where `show` gives back what IPython would show again
        assert output["data"]["text/html"].count("<svg") == 4
        rows = json.loads(output["data"]["text/plain"])["rows"]
        assert [(row["title"], row["words"]) for row in rows] == [("Single", "finished"), ("DDP", "finished")]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--strategies", "ddpp"], "or all, got 'ddpp'"),
        (["--strategies", "ddp", "last"], "a recorded run ('last') and --strategies exclude each other"),
        (["--nproc", "2"], "--nproc has no effect on recorded runs"),
        (["--seed", "0"], "--seed has no effect on recorded runs"),
        (["--strategies", ""], "strategies must not be empty"),
        (["nothing"], "there is no run 'nothing'"),
        ([], "there are no recorded runs to compare; start some with: labkit compare --strategies single,ddp"),
    ],
)
def test_wrong_usage_is_one_sentence(runs, arguments, says):
    done = subprocess.run([*LABKIT, *arguments], cwd=CLONE, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
