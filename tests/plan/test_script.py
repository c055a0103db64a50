"""Generated scripts: every strategy, workload, data set and precision of the tables."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from generated import FIRST, constants, functions, spec
from ruff.__main__ import find_ruff_bin

from labkit.plan.script import command, diff_scripts, write_script
from labkit.plan.spec import PRECISIONS, Spec, SpecError
from labkit.training.strategies import STRATEGIES
from labkit.training.workloads import WORKLOADS


def fits(strategy: str, **asked) -> bool:
    """Whether the Spec is valid; the refusals are tested with each strategy."""
    try:
        return bool(spec(strategy, **asked))
    except SpecError:
        return False


EVERY = [
    (strategy, workload, data)
    for strategy in STRATEGIES
    for workload, row in WORKLOADS.items()
    for data in row.data
    if fits(strategy, workload=workload, data=data)
]
EVERY_PRECISION = [
    (strategy, precision) for strategy in STRATEGIES for precision in PRECISIONS if fits(strategy, precision=precision)
]
EVERY_SCRIPT = [
    (*one, precision) for one in EVERY for precision in PRECISIONS if (one[0], precision) in EVERY_PRECISION
]
SAVING = [one for one in EVERY_PRECISION if FIRST[one[0]] == "cnn" and "save_every" not in STRATEGIES[one[0]].lacks]
RULES = "E4,E7,E9,F,I"  # rules of ruff that scripts must pass


USES_LABKIT = re.compile(r"(import|from) +labkit|labkit\.")


def checked(sources: dict[tuple, str], folder: Path) -> dict[tuple, tuple[str, list[str]]]:
    """Each script with the complaints of ruff, which checks all of them in one run."""
    for number, source in enumerate(sources.values()):
        (folder / f"{number}.py").write_text(source, encoding="utf-8")
    looks = (["format", "--check"], ["check", f"--select={RULES}", "--quiet"])
    said = []
    for look in looks:
        argv = [find_ruff_bin(), *look, "--isolated", "--no-cache", "--output-format=concise", "."]
        said += subprocess.run(argv, cwd=folder, capture_output=True, text=True).stdout.splitlines()
    return {
        asked: (source, [line for line in said if re.search(rf"\b{number}\.py\b", line)])
        for number, (asked, source) in enumerate(sources.items())
    }


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """The scripts of all combinations in the tables."""
    written = {one: write_script(spec(one[0], workload=one[1], data=one[2], precision=one[3])) for one in EVERY_SCRIPT}
    return checked(written, tmp_path_factory.mktemp("scripts"))


@pytest.fixture(scope="module")
def saving(tmp_path_factory):
    """The scripts of all combinations with checkpoints."""
    written = {
        (*one, resume): write_script(spec(one[0], precision=one[1], save_every=10, resume=resume))
        for one in SAVING
        for resume in (None, "/a/step00000030")
    }
    return checked(written, tmp_path_factory.mktemp("scripts"))


def changed(old: Spec, new: Spec) -> set[str]:
    """The names of the functions and constants that differ between two scripts."""
    before, after = ({**constants(text), **functions(text)} for text in (write_script(old), write_script(new)))
    return {name for name in {*before, *after} if before.get(name) != after.get(name)}


@pytest.mark.thorough
@pytest.mark.parametrize(("strategy", "workload", "data", "precision"), EVERY_SCRIPT)
def test_every_script_compiles_is_formatted_and_standalone(strategy, workload, data, precision, scripts):
    source, complaints = scripts[strategy, workload, data, precision]
    compile(source, "train.py", "exec")
    assert complaints == []
    assert not USES_LABKIT.search(source)
    assert source.endswith('if __name__ == "__main__":\n    main()\n')


@pytest.mark.thorough
@pytest.mark.parametrize(("strategy", "precision"), EVERY_PRECISION)
def test_a_script_fits_the_width_of_the_panel(strategy, precision, scripts):
    workload = FIRST[strategy]
    lines = scripts[strategy, workload, WORKLOADS[workload].data[0], precision][0].splitlines()
    assert max(map(len, lines)) <= 92


@pytest.mark.thorough
@pytest.mark.parametrize(("strategy", "precision"), SAVING)
def test_a_script_with_checkpoints_is_formatted_and_standalone(strategy, precision, saving):
    for resume in (None, "/a/step00000030"):
        source, complaints = saving[strategy, precision, resume]
        assert complaints == []
        assert not USES_LABKIT.search(source)
        assert "weights_only=True" in source
        assert "pickle" not in "".join(line for line in source.splitlines() if line.startswith(("import", "from")))
        assert max(map(len, source.splitlines())) <= 92


@pytest.mark.parametrize(("strategy", "workload", "data"), EVERY)
def test_settings_get_the_values_of_the_spec(strategy, workload, data):
    asked = spec(strategy, workload=workload, data=data, batch_size=24, steps=77, samples=960, seed=5)
    found = constants(write_script(asked))
    assert found["BATCH_PER_RANK"] == 24
    assert (found["MAX_STEPS"], found["EPOCHS"]) == (77, -(-77 // asked.steps_per_epoch))
    assert (found["SAMPLES"], found["SEED"]) == (960, 5)
    assert constants(write_script(spec(strategy, epochs=3)))["EPOCHS"] == 3


@pytest.mark.parametrize(
    ("strategy", "workload"), dict.fromkeys((strategy, workload) for strategy, workload, _ in EVERY)
)
def test_every_option_is_in_the_script(strategy, workload):
    plain = spec(strategy, workload=workload)
    for option in (*STRATEGIES[strategy].all_options, *WORKLOADS[workload].options):
        other = (
            option.choices[-1]
            if option.choices
            else not option.default
            if isinstance(option.default, bool)
            else option.default + 1
        )
        if not fits(strategy, workload=workload, options={option.name: other}):
            continue
        asked = spec(strategy, workload=workload, options={option.name: other})
        assert changed(plain, asked), f"the option {option.name} changes nothing"


def test_one_constant_sets_the_type_of_mixed_precision():
    for strategy, precision in EVERY_PRECISION:
        source = write_script(spec(strategy, precision=precision))
        name = {"bf16": "bfloat16", "fp16": "float16"}.get(precision)
        assert re.findall(r"torch\.b?float16", source) == ([f"torch.{name}"] if name else [])
        assert ("DTYPE" in source) == bool(name)


def test_ddp_has_the_buckets_of_torch_unless_their_size_is_set():
    assert "DistributedDataParallel(model)\n" in write_script(spec("ddp"))
    assert "BUCKET_MB" not in write_script(spec("ddp"))
    assert "(model, bucket_cap_mb=BUCKET_MB)\n" in write_script(spec("ddp", options={"bucket_mb": 25}))


def test_fsdp2_has_the_resharding_of_torch_unless_it_is_off():
    for strategy in ("fsdp2", "fsdp2_tp"):
        off = write_script(spec(strategy, options={"reshard_after_forward": False}))
        assert re.search(r'"reshard_after_forward": False\b|reshard_after_forward=False\b', off)
        assert "reshard" not in write_script(spec(strategy)).lower()


@pytest.mark.parametrize(("steps", "every"), [(1, 1), (4, 1), (12, 2), (99, 19), (100, 20), (10_000, 20)])
def test_short_runs_print_losses_too(steps, every):
    assert constants(write_script(spec("ddp", steps=steps)))["PRINT_EVERY"] == every


def test_options_become_constants():
    assert constants(write_script(spec("ddp", options={"bucket_mb": 3})))["BUCKET_MB"] == 3
    gpt = constants(write_script(spec("ddp", workload="gpt", options={"size": "7B"})))
    assert (gpt["LAYERS"], gpt["WIDTH"], gpt["HEADS"]) == (35, 4096, 32)
    assert (
        constants(write_script(spec("ddp", data="mnist", data_dir="/some where/it's")))["DATA_DIR"]
        == "/some where/it's"
    )


def test_batch_arithmetic_is_spelled_out():
    weak, strong = spec("ddp", batch_size=128), spec("ddp", batch_size=128, scaling="strong")
    assert "BATCH_PER_RANK = 128  # × 2 = 256 global; 60,000 samples: 235 steps per epoch\n" in write_script(weak)
    assert "BATCH_PER_RANK = 64  # × 2 = 128 global; 60,000 samples: 469 steps per epoch\n" in write_script(strong)


@pytest.mark.parametrize("fault", ["no_sampler", "shuffle_beside_sampler"])
def test_a_fault_is_named_where_it_is(fault):
    assert '    """Injected fault: ' in write_script(spec("ddp", fault=fault))


def test_comments_are_copied():
    source = write_script(spec("ddp"))
    assert "# no rank leaves while another is still sending" in source
    assert "SEED = 0  # seed of the initial weights" in source


def test_strategies_differ_only_in_their_own_functions():
    own = {"load", "parallelize", "build_optimizer", "loss_of", "train_step", "evaluate"}
    for strategy in STRATEGIES:
        options = {option.name.upper() for option in STRATEGIES[strategy].options}
        helpers = set(
            functions(Path(importlib.util.find_spec(STRATEGIES[strategy].module).origin).read_text(encoding="utf-8"))
        )
        constant = set(STRATEGIES[strategy].constants(spec(strategy)))
        assert changed(
            spec("single", workload=FIRST[strategy]), spec(strategy)
        ) <= own | options | helpers | constant | {
            "data_shard",
            "IS_LOGGING_RANK",
            "CLIP_NORM",  # DeepSpeed sets it even if it is 0
            "RANKS",
            "tensor_plans",
            "micro_batch_loss",
            "own_stages",
            "stage_data",
            "wrap_stage",
            "load_data",  # a pipeline keeps the function, so that what a rank does not need is freed
            "train",
            "main",
        }
    assert changed(spec("ddp"), spec("fsdp2")) <= {"parallelize"}


LADDER = ("single", "ddp", "zero1", "fsdp2", "tp", "pp")


@pytest.mark.parametrize(("lower", "upper"), [pair for pair in pairwise(LADDER) if set(pair) <= set(STRATEGIES)])
def test_a_step_on_the_ladder_changes_little(lower, upper):
    lines = diff_scripts(spec(lower), spec(upper)).splitlines()[2:]
    taken_out, put_in = (sum(line.startswith(sign) for line in lines) for sign in "-+")
    assert max(taken_out, put_in) < (105 if "pp" in (lower, upper) else 40)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_precision_is_written_into_the_step(strategy):
    for precision, word in (("bf16", "bfloat16"), ("fp16", "float16"), ("tf32", "set_float32_matmul_precision")):
        if (strategy, precision) not in EVERY_PRECISION:
            continue
        asked = spec(strategy, precision=precision)
        assert changed(spec(strategy), asked)
        assert word in write_script(asked).replace("bfloat16", "bfloat16" if word == "bfloat16" else "")
    assert "SCALER" not in write_script(spec(strategy, precision="bf16"))


def test_diff_is_unified_and_empty_between_equals():
    text = diff_scripts(spec("single"), spec("ddp"))
    assert text.startswith("--- single-x1/train.py\n+++ ddp-x2/train.py\n@@")
    assert "+    model = DistributedDataParallel(model)\n" in text
    assert "-    return nn.Sequential(*blocks).to(device)\n" in text
    assert diff_scripts(spec("ddp"), spec("ddp")) == ""


def test_command_is_what_the_docstring_says():
    asked = spec("ddp", nproc=4)
    assert command(asked) == "torchrun --standalone --nproc-per-node=4 train.py"
    assert command(asked) in ast.get_docstring(ast.parse(write_script(asked)))
    own = Spec(script="my dir/train.py", args=("--lr", "0.1", "a b"), nproc=2)
    assert command(own) == "torchrun --standalone --nproc-per-node=2 'my dir/train.py' --lr 0.1 'a b'"


def test_specs_without_a_script_are_refused():
    with pytest.raises(SpecError, match="number of ranks, which is not set") as open_ranks:
        write_script(Spec("ddp"))
    assert open_ranks.value.field == "nproc"
    with pytest.raises(SpecError, match=r"own\.py is your own script"):
        write_script(Spec(script="own.py"))
