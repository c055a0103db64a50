"""The table of known errors, on the real messages: raised by torch and libraries on two CPU ranks."""

from __future__ import annotations

import ast
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import test_diagnose_errors
from diagnosed import end, error, first, fold, names, saw, spec, start, status
from places import SCRIPTS

from labkit.analysis.diagnose.known_errors import KNOWN_ERRORS

SCRIPT = SCRIPTS / "known_errors.py"
CASES = [
    node.name
    for node in ast.parse(SCRIPT.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name != "mesh"
]
# The row of a case that is another way to the same error.
ROW = {
    "mesh_too_large": "group_too_large",
    "mixed_dtypes": "uniform_units",
    "mixed_requires_grad": "uniform_units",
    "mixed_update": "mixed_tensors",
    "odd_micro_batches": "stage_shapes",
    "no_cuda_in_build": "no_gpus",
    "unscaled_twice": "scaler_order",
    "nothing_scaled": "scaler_order",
}
LIBRARIES = ("accelerate", "deepspeed")  # the first word of a case that needs one


def needed(case: str) -> str | None:
    """The library that a case needs besides torch."""
    word = case.partition("_")[0]
    return word if word in LIBRARIES else None


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] if needed(c) else []) for c in CASES])
def test_a_real_message_gets_cause_and_fix(case, forks, tmp_path):
    if (library := needed(case)) and not find_spec(library):
        pytest.skip(f"{library} is not installed")
    (tmp_path / "case.json").write_text(json.dumps(case))
    forks.launch(SCRIPT.read_text(), 2, tmp_path)
    said = {rank: json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1) if raised(tmp_path, rank)}
    assert said, "no rank raised an error"
    errors = [error(rank, one["message"], one["type"]) for rank, one in said.items()]
    state = fold(spec(), start(0, 1), *errors, status("failed"))
    found = first(state, ROW.get(case, case))
    assert found.kind == "wrong" and found.cause and found.fix and found.ranks[0] in said
    assert names(state) == [found.name]


def raised(folder: Path, rank: int) -> bool:
    return (folder / f"rank{rank}.json").exists()


def test_every_row_is_tested_on_a_message():
    shown = {name for name, *_ in test_diagnose_errors.test_an_error_that_says_what_it_is.pytestmark[0].args[1]}
    real = {ROW.get(case, case) for case in CASES}
    assert {known.name for known in KNOWN_ERRORS} - real - shown == {"nodes_differ"}, (
        "a run on two nodes shows that one"
    )
    assert real <= {known.name for known in KNOWN_ERRORS}


@pytest.mark.parametrize("follows", [known for known in KNOWN_ERRORS if known.follows], ids=lambda known: known.name)
def test_the_consequence_of_an_error_is_no_finding_of_its_own(follows):
    message = {
        "peers_missing": "Timed out after 901 seconds waiting for clients. 1/2 clients joined.",
        "no_connection": "The client socket has timed out after 60000ms while trying to connect to (10.0.0.1, 29500).",
        "barrier_not_reached": "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 1000 ms",
    }[follows.name]
    alone = fold(spec(), start(0, 1), error(0, message), status("failed"))
    assert names(alone) == [follows.name]
    after = fold(
        spec(), start(0, 1), error(1, "bad sample", "ValueError"), error(0, message, t=501.0), status("failed")
    )
    assert names(after) == ["first_failure"]


def test_the_error_of_the_rank_that_failed_first_counts():
    """Rank 0 reports another known error, which comes earlier in the table, because rank 1 is gone."""
    own = "'weight' must be 2-D"
    later = error(0, "Expected to mark a variable ready only once.", t=501.0)
    state = fold(spec(), start(0, 1), error(1, own), later, status("failed"))
    assert first(state, "flat_parameter").ranks == (1, 0)


def test_the_evidence_is_the_line_that_says_it():
    message = (
        "CheckpointException ranks:dict_keys([0])\n" + "  File x\n" * 40 + "Missing key in checkpoint state_dict: b."
    )
    found = first(fold(spec(), start(0), error(0, message, "CheckpointException"), status("failed")), "key_not_saved")
    assert found.evidence.endswith("Missing key in checkpoint state_dict: b.")


def test_an_error_in_the_first_backward_is_one_finding():
    error_of_both = [error(rank, "Expected to mark a variable ready only once.", t=500.0 + rank) for rank in (0, 1)]
    seen = [saw(rank, "gradients", backwards=1) for rank in (0, 1)]
    assert names(fold(spec(), start(0, 1), seen, error_of_both, status("failed"))) == ["marked_twice"]
    assert names(fold(spec(), start(0, 1), seen, end(0), end(1), status("finished")))[0] == "trains_elsewhere"
