"""Every strategy takes its steps in each way in which torch updates parameters: one by one, as on CPUs by default, or
all of a group at once, as on GPUs, where an update of DTensors together with other tensors fails."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from generated import ONLY
from places import SCRIPTS

from labkit.plan.script import write_script
from labkit.plan.spec import Spec, SpecError
from labkit.setup.preflight import NOTHING
from labkit.training.rows import Option, Strategy
from labkit.training.strategies import STRATEGIES
from labkit.training.workloads import WORKLOADS

RUN = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
from updates import main
main()
"""
WAYS = ("one by one", "foreach", "fused")
ON_GPUS_ONLY = {"cpu_offload"}  # moves state to the CPU
RANKS = {"replicas": 4}  # with this option; otherwise the default of the strategy, at most 4


def values(option: Option) -> list:
    """The values of an option that differ from its default; of a number, the next one."""
    if option.choices:
        return [choice for choice in option.choices if choice != option.default]
    return [not option.default] if isinstance(option.default, bool) else [option.default + 1]


def changes(row: Strategy) -> Iterator[dict]:
    """What can change the tensors of an update, as fields of a Spec; first what is tried with every workload."""
    split = {} if "accumulate" in row.lacks else {"accumulate": 2}
    yield {"options": {"clip_norm": 0.1, **split}}
    for option in row.options:
        for value in values(option):
            yield {"options": {"clip_norm": 0.1, option.name: value}}
    yield {"precision": "bf16", "options": {"warmup_steps": 1, "checkpoint_activations": True}}
    if row.process_group:  # an emulation on CPUs knows no fp16
        yield {"precision": "fp16", "options": {"clip_norm": 0.1}}
    yield {"save_every": 1, "options": {}}


def works(way: str, script: str) -> bool:
    """Whether torch can update in this way: a fused optimizer rejects what a ShardedGradScaler passes to it."""
    return way != "fused" or "ShardedGradScaler" not in script


def cases(row: Strategy, thorough: bool) -> dict[str, Spec]:
    """The Specs of a strategy by name: each workload, and each change of one workload, or of all if `thorough`."""
    found = {}
    for workload in WORKLOADS:
        for number, change in enumerate(changes(row)):
            if number and not thorough and workload != ONLY.get(row.name, "gpt"):
                continue
            options = {name: value for name, value in change["options"].items() if name not in row.lacks}
            if options.keys() & ON_GPUS_ONLY or WORKLOADS[workload].needs != NOTHING:
                continue
            nproc = next((RANKS[name] for name in options if name in RANKS), min(row.default_nproc or 2, 4))
            size = {"nproc": nproc, "batch_size": 8, "scaling": "strong", "samples": 64, "device": "cpu"}
            steps = 1 if "save_every" in change else 2  # then the script runs again, and resumes
            try:
                spec = Spec(row.name, workload, steps=steps, **size, **change | {"options": options})
            except SpecError:
                continue
            told = [f"{name}={value}" for name, value in (options | change).items() if name != "options"]
            found["-".join([workload, *told])] = spec
    return found


@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_are_updated_one_by_one_and_all_at_once(strategy, thorough, forks, tmp_path):
    specs = cases(STRATEGIES[strategy], thorough)
    assert specs
    for nproc in {spec.processes for spec in specs.values()}:
        folder = tmp_path / f"{nproc}"
        folder.mkdir()
        scripts = {name: write_script(spec) for name, spec in specs.items() if spec.processes == nproc}
        ways = {name: [way for way in WAYS[not thorough :] if works(way, text)] for name, text in scripts.items()}
        (folder / "cases.json").write_text(json.dumps({"scripts": scripts, "ways": ways}))
        forks.launch(RUN, nproc, folder, limit=600.0)
        for rank in range(nproc):
            found = json.loads((folder / f"rank{rank}.json").read_text())
            for name in scripts:
                for way in ways[name]:
                    assert found[name][way]["error"] is None, f"{name}, {way}: {found[name][way]['error']}"
                first, *others = (found[name][way]["losses"] for way in ways[name])
                assert len(first) == 2
                assert all(other == pytest.approx(first, rel=1e-4, nan_ok=True) for other in others), name
