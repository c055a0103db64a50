"""Every fault in a real run, with the right finding first, in its replay and on its page; the choice of a fault in the
panel and in a diff; and no finding of kind "wrong" in healthy runs."""

from __future__ import annotations

import html
import re

import pytest
from commands import called
from conftest import wait_until
from generated import ONLY
from panels import reading

from labkit import Spec, SpecError, run
from labkit.analysis.diagnose import findings
from labkit.frontends.handout import run_page
from labkit.frontends.panel.lab import Lab
from labkit.plan.script import diff_scripts, write_script
from labkit.record.folder import RunFolder
from labkit.runs.handle import settle
from labkit.training.faults import FAULTS
from labkit.training.strategies import STRATEGIES

SMALL = {"workload": "mlp", "nproc": 2, "device": "cpu", "batch_size": 16, "samples": 512, "hang_after": 3}
LENGTH = {"no_set_epoch": {"epochs": 2}}


def text_of(html_text: str) -> str:
    """The text of a piece of HTML."""
    return html.unescape(re.sub("<[^>]+>", "", html_text))


@pytest.mark.parametrize("fault", FAULTS)
def test_the_diagnosis_names_the_fault_and_so_do_replay_and_page(fault):
    patience = {} if FAULTS[fault].finding == "hang" else {"hang_after": 30}  # a busy machine may start ranks slowly
    job = run("ddp", fault=fault, **SMALL | patience, **LENGTH.get(fault, {"steps": 12}))
    try:
        wait_until(lambda: job.state.over or any(found.name == "hang" for found in findings(job.state)), 120)
        while_it_lasted = findings(job.state)
    finally:
        job.stop()
    found = findings(job.state) if job.state.status.state != "stopped" else while_it_lasted
    assert found, f"no findings; the run {job.words}"
    assert found[0].name == FAULTS[fault].finding, [(one.name, one.title) for one in found]
    assert found[0].evidence and found[0].cause and found[0].fix
    check_replay(job.folder)
    page = text_of(run_page(job.folder).body)
    assert "Diff to one device" in page and f"+Fault  {FAULTS[fault].title} (injected)" in page
    if job.state.status.state != "stopped":
        assert findings(job.state)[0].title in page


def check_replay(folder: RunFolder) -> None:
    """The recorded run opens in the panel, with its script and the diff, and plays to its end."""
    lab = reading(Lab(recorded=folder.path))
    wait_until(lambda: lab._open is not None and not lab._starting)
    assert text_of(lab._sources().script.value).strip() == folder.text(folder.script).strip()
    assert "(injected)" in text_of(lab._sources().diff.value)
    lab._view.replay.set_speed(16.0)
    lab._view.replay.play()
    wait_until(lambda: lab._view.state.over)
    wait_until(lambda: f"recorded: {folder.read_status().state}" in text_of(lab._view.words.value))


@pytest.mark.parametrize("fault", FAULTS)
def test_the_panel_shows_the_script_that_run_executes(fault):
    chosen = {"strategy": "ddp", "workload": "mlp", "nproc": 2, "device": "cpu"} | LENGTH.get(fault, {"steps": 12})
    lab = reading(Lab(**chosen))
    healthy = lab._sources().script.value
    lab._choices._settings.fault.value = fault
    assert text_of(lab._sources().script.value).strip() == write_script(lab.spec).strip()
    assert lab._sources().script.value != healthy and "(injected)" in text_of(lab._sources().diff.value)
    opened = reading(Lab(**chosen, fault=fault))
    assert (opened.spec, opened._sources().diff.value) == (lab.spec, lab._sources().diff.value)
    lab._choices._settings.fault.value = None
    assert lab._sources().script.value == healthy


@pytest.mark.parametrize("order", [("single", "ddp"), ("ddp", "single")])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_diff_to_one_device_shows_the_fault(fault, order, capsys):
    length = [text for name, value in LENGTH.get(fault, {"steps": 12}).items() for text in (f"--{name}", str(value))]
    assert called("diff", *order, "--fault", fault, "--nproc", "2", "--option", "bucket_mb=1", *length) == 0
    sign = "+" if order[1] == "ddp" else "-"
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"{sign}Fault  {FAULTS[fault].title}"[:40]) for line in lines)
    assert any(line.startswith(f"{sign}BUCKET_MB = 1 ") for line in lines)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_whatever_runs_has_a_counterpart_on_one_device(strategy):
    row = STRATEGIES[strategy]
    asked = {"workload": ONLY.get(strategy, "mlp"), "nproc": row.default_nproc or 2, "epochs": 2, "samples": 512}
    kinds = [{"fault": fault} for fault in FAULTS] + [{"save_every": 5, "checkpoint_async": True}]
    kinds += [{"options": {option.name: option.choices[-1]}} for option in row.options if option.choices]
    for kind in kinds:
        try:
            spec = Spec(strategy, device="cpu", **asked, **kind)
        except SpecError:
            continue
        alone = spec.on_one_device
        assert (alone.strategy, alone.nproc, alone.fault, alone.on_one_device) == ("single", 1, None, alone)
        assert (alone.workload, alone.samples, alone.save_every) == (spec.workload, spec.samples, spec.save_every)


def test_a_hang_is_told_while_it_lasts_and_ends_with_stop():
    job = run("ddp", fault="skipped_collective", **SMALL, steps=12)
    try:
        hang = wait_until(lambda: next((found for found in findings(job.state) if found.name == "hang"), None), 120)
        assert not job.state.over
        wait_until(lambda: all(rank.waiting for rank in job.state.ranks.values()), 30)
        hang = next(found for found in findings(job.state) if found.name == "hang")
    finally:
        job.stop()
    assert "waited for" in hang.title and "never reached it" in hang.title
    for rank, op, where in ((0, "barrier #", "in fault_step"), (1, "all_reduce #", "in train_step")):
        told = next(part for part in hang.evidence.split("; ") if part.startswith(f"rank {rank}:"))
        assert op in told and where in told and "4 steps done" in told
    assert job.state.status.state == "stopped"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_healthy_run_has_no_wrong_finding(strategy):
    row = STRATEGIES[strategy]
    nproc = row.default_nproc or 2
    workload = ONLY.get(strategy, "mlp")
    size = {"nproc": nproc, "batch_size": 4 * nproc, "scaling": "strong", "steps": 9, "samples": 512}
    job = run(strategy, workload=workload, device="cpu", **size).wait(400)
    state = job.state
    assert state.status.state == "finished", job.words
    assert [found for found in findings(state) if found.kind in ("wrong", "unseen")] == []
    steps = {rank.rank: sorted(rank.timelines) for rank in state.ranks.values()}
    assert all(those == [3, 8] for those in steps.values()), steps
    assert all(rank.memory_step.peak == sum(rank.memory_step.at_peak.values()) > 0 for rank in state.ranks.values())


@pytest.mark.parametrize("fault", FAULTS)
def test_the_script_shows_the_fault(fault):
    healthy = settle("ddp", **SMALL, **LENGTH.get(fault, {"steps": 12}))
    ill = settle("ddp", fault=fault, **SMALL, **LENGTH.get(fault, {"steps": 12}))
    changes = [
        line for line in diff_scripts(healthy, ill).splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert any("(injected)" in line for line in changes)
    assert 2 <= len(changes) <= 40
    assert not any("INJECT_" in line or "labkit" in line for line in changes)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"fault": "meteor"}, "fault must be one of slow_rank, "),
        (
            {"strategy": "single", "fault": "killed_rank"},
            "needs several processes, and single with --nproc 1 runs in one; use ddp with --nproc 2",
        ),
        (
            {"strategy": "tp", "fault": "no_sampler"},
            "with tp and --nproc 2 all train on the same; use ddp or fsdp2 with --nproc 2",
        ),
        ({"strategy": "fsdp2", "fault": "unused_parameters"}, "affects only DDP, and the strategy is fsdp2"),
        (
            {"strategy": "fsdp2", "fault": "nan_gradient"},
            "needs unsharded gradients, and fsdp2 shards them; use ddp or tp",
        ),
        (
            {"fault": "no_set_epoch", "steps": 5},
            "appears in the second epoch, and the run has only one; use --epochs 2",
        ),
    ],
)
def test_a_fault_that_cannot_be_is_refused_in_one_sentence(fields, words):
    with pytest.raises(SpecError) as refused:
        settle(
            **{"what": fields.get("strategy", "ddp"), "device": "cpu"}
            | {k: v for k, v in fields.items() if k != "strategy"}
        )
    assert words in str(refused.value) and refused.value.field == "fault"
