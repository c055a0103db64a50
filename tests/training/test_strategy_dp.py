"""dp: its limits, its note on emulation, and the measurements of its replicas."""

from __future__ import annotations

import pytest
from conftest import warm_run
from folded import apply
from probed import watched

from labkit.analysis.summary import summarise
from labkit.plan.script import write_script
from labkit.plan.spec import Spec, SpecError
from labkit.record.state import RunState


def small(**asked) -> Spec:
    return Spec(
        "dp", **{"workload": "mlp", "nproc": 2, "batch_size": 16, "steps": 4, "samples": 99, "device": "cpu"} | asked
    )


def test_one_device_is_refused_with_a_fix():
    with pytest.raises(SpecError, match=r"dp splits the batch .* got --nproc 1; use --nproc 2, or the strategy single"):
        small(nproc=1)
    with pytest.raises(SpecError, match=r"dp has no option compile: nn.DataParallel"):
        small(options={"compile": True})


def test_on_cpu_it_says_that_it_is_emulated_and_on_gpus_it_is_data_parallel():
    emulated, real = write_script(small()), write_script(small(device="cuda"))
    assert "Emulated on CPU" in emulated
    assert "nn.DataParallel(model" not in emulated
    assert "nn.DataParallel(model" in real
    assert "Emulated" not in real
    assert "Thread" not in real
    assert "--nproc-per-node=1 train.py" in real


@pytest.mark.parametrize(
    "asked",
    [
        {"precision": "bf16", "steps": None, "samples": 33},
        {"nproc": 4, "steps": None, "samples": 65},
        {"workload": "gpt", "steps": 1},
    ],
)
def test_it_runs_if_the_last_batch_has_fewer_samples_than_replicas(asked, tmp_path):
    (tmp_path / "train.py").write_text(write_script(small(**asked)), encoding="utf-8")
    handle = warm_run(tmp_path / "train.py", nproc=1, device="cpu", sample_every=0)
    assert handle.words == "finished", handle.logs(0, "stderr")
    assert "epoch 1: " in handle.logs(0)


def test_replicas_are_measured_and_folded(tmp_path):
    spec = small()
    (tmp_path / "train.py").write_text(write_script(spec), encoding="utf-8")
    handle, told = watched(tmp_path / "train.py")
    assert handle.words == "finished", handle.logs(0, "stderr")
    events = told.events
    steps = [event for event in events if event["kind"] == "replica"]
    assert not [event for event in events if event["kind"] == "probe_error"]
    assert [event["step"] for event in steps] == [1, 2, 3, 4]
    assert [[replica["samples"] for replica in event["replicas"]] for event in steps] == [[16, 16]] * 3 + [[2, 1]]
    state = RunState()
    apply(state, {"kind": "spec", "t": 0.0, "spec": spec.to_json()})
    for event in events:
        apply(state, event)
    assert (state.broken, state.world_size, state.replicas) == (0, 1, 1.0)
    found = summarise(state)
    assert [one.replica for one in found.replicas] == [0, 1]
    assert all(getattr(replica, name) > 0 for replica in found.replicas for name in ("forward", "cpu", "memory"))
    assert found.replicas[0].extra.gradients == found.ranks[0].memory_bytes["gradients"]
    assert 0 <= found.gil_wait <= 1
    assert found.note.startswith("Emulated on CPU")
