"""Every public name validates its arguments: one sentence that names the value, immediately, and nothing is started."""

from __future__ import annotations

import inspect
import math
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fabricate import FakeRun

import labkit
from labkit import (
    Lab,
    Run,
    Spec,
    SpecError,
    check,
    compare,
    diff_scripts,
    excerpt,
    on_trial,
    place,
    run,
    show,
    write_script,
)
from labkit.analysis.diagnose import NAMES
from labkit.common.arguments import Number, shown
from labkit.course import pictures
from labkit.frontends.magic import report
from labkit.frontends.magic.cell import Cell, CellError
from labkit.plan.spec import bounds_of
from labkit.setup.machine import Machine
from labkit.training.strategies import STRATEGIES
from labkit.training.workloads import WORKLOADS

DOCUMENTED = (SpecError, ValueError, TypeError, LookupError)
HUGE = 10**5000
DDP = Spec("ddp", nproc=2, device="cpu")
SMALL = Machine(gpus=(), cores=2, memory=8 << 30)


class Rude:
    """A value whose repr raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


NUMBERS = (0, -1, 1.5, math.nan, math.inf, -math.inf, 1e400, 10**20, HUGE, "2", "", True, None, [], Rude())
TEXTS = ("", "typo", "x" * 5000, "a\nb", "\0", 5, b"ddp", ["ddp"], {}, None, Rude())
FLAGS = ("yes", 1, 0, None, [], Rude())
PATHS = ("", "\0", b"x", 5, [], Rude())


def refused(call: Callable[[], Any], value: Any = ...) -> str:
    """The sentence with which a call is refused within 5 s; it quotes `value`."""
    began = time.monotonic()
    with pytest.raises(DOCUMENTED) as caught:
        call()
    assert time.monotonic() - began < 5
    sentence = str(caught.value.args[0])
    assert sentence and "\n" not in sentence and not sentence.endswith("."), sentence
    assert len(sentence) < 700, sentence
    if value is not ...:
        assert shown(value) in sentence or str(value) in sentence, sentence
    return sentence


def nothing_started(runs: Path) -> bool:
    return not runs.exists() or not list(runs.iterdir())


# ---- Spec, and functions that take its fields

NUMERIC = [name for name in Spec.__dataclass_fields__ if bounds_of(name)]
WRONG_FIELDS = [
    *(
        (name, value)
        for name in NUMERIC
        for value in NUMBERS
        if not (value is None and Spec.__dataclass_fields__[name].default is None)
    ),
    *(
        (name, value)
        for name in ("strategy", "workload", "data", "precision", "fault")
        for value in TEXTS
        if value is not None
    ),
    *((name, value) for name in ("scaling", "device") for value in TEXTS),
    *((name, value) for name in ("tensors", "as_module") for value in FLAGS),
    *((name, value) for name in ("script", "resume", "data_dir") for value in PATHS),
    *(("options", value) for value in ("a=1", ["a"], 5, {1: 2}, {"typo": 1}, None)),
    *(("args", value) for value in ("x", ("x",), 5, [5], {"x": 1}, None)),
    ("nprocs", 2),
    ("x" * 5000, 1),
]
ALLOWED = {("seed", 0), ("sample_every", 0), ("max_restarts", 0), ("seed", 10**20)}
STARTING = {
    "Spec": lambda **fields: Spec(**fields),
    "run": lambda **fields: run(DDP, **fields),
    "compare": lambda **fields: compare(["ddp"], **fields),
    "Lab": lambda **fields: Lab(**fields),
}


def is_wrong(name: str, value: Any) -> bool:
    bounds = bounds_of(name) if name in Spec.__dataclass_fields__ else None
    return (
        bounds is None
        or isinstance(value, bool)
        or not (isinstance(value, int) and bounds.minimum <= value <= bounds.maximum)
    )


@pytest.mark.parametrize("name", STARTING)
def test_no_field_of_a_spec_accepts_invalid_values(name, runs):
    fails = []
    for field, value in WRONG_FIELDS:
        if not is_wrong(field, value):
            continue
        given = {field: value}
        try:
            refused(lambda given=given: STARTING[name](**given))
        except (AssertionError, pytest.fail.Exception) as error:
            fails.append(f"{name}({field}={shown(value)}): {str(error).splitlines()[0]}")
    assert not fails, "\n".join(fails)
    assert nothing_started(runs)


def test_refusal_of_a_field_names_it_with_bounds_and_value():
    assert (
        refused(lambda: Spec(seed=2**64), 2**64)
        == "--seed must be an integer from 0 to 9223372036854775807, got 18446744073709551616"
    )
    assert refused(lambda: Spec(nproc=HUGE)).endswith("got an integer of 16610 bits")
    assert refused(lambda: Spec(nprocs=2)).startswith(
        "Spec has no field 'nprocs' (did you mean nproc?); fields: strategy, "
    )
    assert (
        refused(lambda: run("ddp", args=("x",)))
        == "args=('x',) applies only to your own script; name it with script='train.py'"
    )
    assert refused(lambda: Spec(script="train.py", precision="bf16")).startswith(
        "precision 'bf16' applies only to a strategy"
    )


# ---- options

OPTIONS = {(strategy.name, option.name): option for strategy in STRATEGIES.values() for option in strategy.all_options}
OPTIONS |= {("ddp", option.name): option for workload in WORKLOADS.values() for option in workload.options}


@pytest.mark.parametrize("key", OPTIONS, ids=lambda key: "-".join(key))
def test_no_option_accepts_invalid_values(key):
    option = OPTIONS[key]
    for value in (
        math.nan,
        math.inf,
        "nan",
        "inf",
        "-inf",
        1e400,
        "1e400",
        -1,
        "-1",
        HUGE,
        "9" * 5000,
        1.5e300,
        None,
        [],
        {},
        b"1",
        "",
        Rude(),
    ):
        with pytest.raises(ValueError, match=f"option {option.name} must be .*, got ") as caught:
            option.parse(value)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_the_bounds_of_every_number_contain_its_default():
    for option in OPTIONS.values():
        if option.bounds is not None:
            assert option.parse(option.default) == option.default
            assert math.isfinite(option.bounds.minimum) and math.isfinite(option.bounds.maximum)
    for name in NUMERIC:
        default = Spec.__dataclass_fields__[name].default
        assert default is None or bounds_of(name).check(name, default) == default


def test_clip_norm_in_a_script_is_a_number():
    assert "CLIP_NORM = 1000.0" in write_script(Spec("ddp", nproc=2, options={"clip_norm": "1e3"}))
    for value in ("nan", "inf", math.nan, math.inf):
        assert "clip_norm must be a number from 0 to 1e+12" in refused(
            lambda value=value: Spec(options={"clip_norm": value})
        )


# ---- combinations of sizes


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"batch_size": 99_999_999_999}, "--batch-size must be an integer from 1 to 1000000000"),
        (
            {"batch_size": 1_000_000, "nproc": 2},
            "the 30000 samples that a rank has per epoch; use --batch-size 30000, or more --samples",
        ),
        (
            {"batch_size": 60_002, "nproc": 2, "scaling": "strong"},
            "the 30000 samples that a rank has per epoch; use --batch-size 60000",
        ),
        (
            {"samples": 10**9},
            (
                "samples of digits need 2.9 TiB on each of 2 ranks, and this machine has 8.0 GiB of memory; use"
                " --samples 1366083 or less"
            ),
        ),
        (
            {"options": {"workers": 60}},
            (
                "workers=60 on 2 ranks starts 120 processes, more than the maximum of 16 for 2 cores; use workers=8 or"
                " less"
            ),
        ),
        (
            {"options": {"accumulate": 256}},
            "accumulate=256 splits a batch of 128 samples into more micro-batches than samples",
        ),
        (
            {"nproc": 60_001},
            "60000 samples are too few for 60001 ranks; use --samples 60001 or more, or at most 60000 ranks",
        ),
        ({"nproc": 60_001, "data": "mnist"}, "60000 samples are too few for 60001 ranks; use at most 60000 ranks"),
    ],
)
def test_sizes_that_are_too_large_are_refused_with_sizes_that_fit(asked, says):
    assert says in refused(lambda: Spec("ddp", **asked).on(SMALL))


def test_the_advice_of_a_refusal_is_accepted():
    assert Spec("ddp", nproc=2, batch_size=30_000).on(SMALL).steps_per_epoch == 1
    assert Spec("ddp", samples=1_366_083).on(SMALL).train_samples == 1_366_083
    assert Spec("ddp", options={"workers": 8}).on(SMALL).options["workers"] == 8


def test_a_default_batch_is_reduced_to_the_samples():
    spec = Spec("ddp", nproc=2, samples=10)
    assert (spec.batch_per_rank, spec.global_batch, spec.steps_per_epoch) == (5, 10, 1)
    assert "BATCH_PER_RANK = 5" in write_script(spec)


@pytest.mark.parametrize(
    ("strategy", "nproc", "advice"),
    [
        ("ddp", 1, "use --nproc 2"),
        ("fsdp2", 1, "use --nproc 2"),
        ("fsdp2_tp", 2, "use --nproc 4"),
        ("single", 1, "use ddp or fsdp2 with --nproc 2"),
        ("tp", 2, "use ddp or fsdp2 with --nproc 2"),
    ],
)
def test_a_fault_advises_what_this_strategy_can_do(strategy, nproc, advice):
    assert refused(lambda: Spec(strategy, nproc=nproc, fault="slow_rank")).endswith(advice)


# ---- the other public names


def calls(fake: Run) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Public names with invalid arguments."""

    def each(text: str, values: tuple, call: Callable[[Any], Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
        for value in values:
            yield f"{text}({shown(value)})", partial(call, value)

    yield from each("run", ("", "ddpp", None, 5, b"ddp", [], "nowhere.py", "\0.py", "x" * 5000 + ".py", Rude()), run)
    yield from each("run script=", ("train.py",), lambda value: run("ddp", script=value))
    yield from each("run detached=", FLAGS, lambda value: run(DDP, detached=value))
    yield from each("run stdin=", ("x", 1.5, -1, 10**6, HUGE, True, [], Rude()), lambda value: run(DDP, stdin=value))
    yield from each(
        "run as_module", ("", "a/b.py", "nowhere.at.all", "1", ".", "a."), lambda value: run(value, as_module=True)
    )
    yield from each("place", NUMBERS, place)
    yield from each("compare", ("", "typo", None, 5, [], [5], [[]], ["ddp", "typo"], {"typo": 1}, Rude()), compare)
    yield from each("compare all nproc=", (0, -1, math.nan, HUGE), lambda value: compare("all", nproc=value))
    yield from each("compare script=", ("train.py",), lambda value: compare("all", script=value))
    yield from each("show", (None, 5, b"x", "", "typo", "\0", "x" * 5000, [], Rude()), show)
    yield from each("Run", (None, "last", 5), Run)
    yield from each("Run.attach", (None, 5, b"x", "", "typo", "\0", "x" * 5000, Rude()), Run.attach)
    for name in ("write_script", "excerpt"):
        yield from each(name, ("ddp", None, 5, {}, Rude()), getattr(labkit, name))
    yield "diff_scripts a", lambda: diff_scripts("ddp", DDP)
    yield "diff_scripts b", lambda: diff_scripts(DDP, None)
    yield "excerpt without names", lambda: excerpt(DDP)
    yield from each("excerpt", ("", "typo", 5, None, [], "x" * 5000), lambda value: excerpt(DDP, value))
    yield from each("check", (None, 5, "", "typo", "ddp.typo", [], "x" * 5000), lambda value: check(value, 1))
    yield from each("on_trial", (None, 5, "", "typo", [], "x" * 5000), on_trial)
    yield from each("on_trial quick=", FLAGS, lambda value: on_trial("batch", quick=value))
    yield from each("on_trial rounds=", NUMBERS, lambda value: on_trial("batch", rounds=value))
    yield from each("Lab presentation=", FLAGS, lambda value: Lab(presentation=value))
    yield from each("Lab recorded=", ("", "typo", 5, b"x", "\0", Rude()), lambda value: Lab(recorded=value))
    yield "Lab script=", lambda: Lab(script="train.py")
    yield "report without a name", lambda: report(5)
    yield from each(
        "report", (object(), b"x", {1: 2}, [0] * 2000, int, [[[[[[[[[[1]]]]]]]]]]), lambda value: report(x=value)
    )
    yield from each("wait until=", ("typo", "", 5, [], "x" * 5000, Rude()), lambda value: fake.wait(until=value))
    yield from each(
        "wait timeout=", (-1, math.nan, math.inf, "5", 1e300, True, [], Rude()), lambda value: fake.wait(timeout=value)
    )
    yield from each("figure", TEXTS, fake.figure)
    yield from each("capture", FLAGS, fake.capture)
    yield from each("trace", ("/nonexistent/x.json", *PATHS), fake.trace)
    yield "trace of a run without profiled steps", fake.trace
    yield from each("logs rank=", (-1, 2, 10**20, HUGE, 1.5, "0", True, None, []), fake.logs)
    yield from each("logs stream=", TEXTS, lambda value: fake.logs(0, value))


@pytest.fixture
def fake(runs) -> Iterator[Run]:
    made = FakeRun(runs)
    made.start()
    yield Run.attach(made.folder.path)
    made.close()


def test_no_public_name_accepts_invalid_values(fake, runs):
    fails = []
    for text, call in calls(fake):
        try:
            refused(call)
        except (AssertionError, pytest.fail.Exception) as error:
            fails.append(f"{text}: {str(error).splitlines()[0]}")
        except Exception as error:
            fails.append(f"{text}: {type(error).__name__}: {error}"[:200])
    assert not fails, "\n".join(fails)
    assert [path.name for path in runs.iterdir()] == [fake.name]


def test_every_public_name_is_tried(fake):
    tried = {text.partition("(")[0].split()[0].partition(".")[0] for text, _ in calls(fake)}
    elsewhere = {"Spec": STARTING, "SpecError": "an error", "my_progress": "takes nothing", "pictures": "below"}
    assert set(labkit.__all__) <= tried | elsewhere.keys()


@pytest.mark.parametrize(
    "line", ["", "0", "-1", "x", "1.5", "9" * 5000, "2 --device tpu", "2 --as 1x", "2 --typo", "nan", "²"]
)
def test_a_cell_magic_refuses_what_it_cannot_run(line):
    with pytest.raises(CellError) as caught:
        Cell.read(line, "print(1)", SMALL)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_every_finding_can_be_waited_for():
    """`wait(until=...)` accepts the names of all findings of the rules."""
    folder = Path(labkit.__file__).parent / "analysis" / "diagnose"
    written = {
        name for path in folder.glob("*.py") for name in re.findall(r'name="(\w+)"', path.read_text(encoding="utf-8"))
    }
    assert written and written <= set(NAMES)


# ---- pictures

BAD = {
    "int": (None, -1, 10**20, HUGE, math.nan, math.inf, "x", "", [], {}, True, 1.5, Rude()),
    "float": (None, -1, 10**400, math.nan, math.inf, "x", "", [], {}, True, Rude()),
    "bool": (None, 0, 1, "x", [], Rude()),
    "str": (None, 5, "typo", "", [], Rude()),
    "list": (None, -1, "x", [], {}, [None], ["x"], [math.nan], [[]], [HUGE], {"x": 1}, Rude()),
    "dict": (None, -1, "x", [], {}, {"x": None}, {1: 2}, {"x": math.nan}, {"x": "y"}, {"x": HUGE}, Rude()),
    "object": (None, -1, "x", [], {}, Rude()),
}
GOOD = {  # for parameters without a default
    "sizes": [1.0, 2.0],
    "measured": {"a": [1.0, 2.0]},
    "modelled": {"a": [1.0, 2.0]},
    "order": [0, 1, 2, 3],
    "ranks": 2,
    "gradients": [[1.0], [2.0]],
    "parameters": 1e9,
    "devices": 2,
    "load": 0.1,
    "compute": 0.1,
    "workers": 1,
    "batches": 2,
    "fetch": 0.1,
    "launch": 0.1,
    "copy": 0.1,
    "steps": 2,
    "waits": True,
    "axes": {"dp": 2, "tp": 2},
    "axis": "dp",
    "sent": {"dp": 1.0, "tp": 2.0},
    "per_node": 2,
    "inside": 1.0,
    "between": 1.0,
    "micro_batches": 4,
    "owner": "gradients",
    "stage": 1,
    "units": 2,
    "x": [[1.0, 2.0]],
    "a": [[1.0, 2.0], [3.0, 4.0]],
    "b": [[1.0, 2.0], [3.0, 4.0]],
    "h": [[1.0, 2.0]],
    "schedule": "1F1B",
    "rank": 0,
    "costs": (),
}


def drawn() -> Iterator[tuple[str, Callable]]:
    for topic in pictures.TOPICS:
        module = getattr(pictures, topic)
        for name, function in vars(module).items():
            if (
                not name.startswith("_")
                and inspect.isfunction(function)
                and function.__module__.startswith("labkit.course.pictures.")
                and hasattr(function, "__wrapped__")
            ):
                yield f"{topic}.{name}", function


def kind_of(annotation: str) -> str:
    wanted = annotation.partition(" | ")[0]
    if wanted.startswith("Mapping"):
        return "dict"
    return "list" if wanted.startswith("Sequence") or wanted == "Matrix" else wanted if wanted in BAD else "object"


@pytest.mark.parametrize(("name", "function"), drawn(), ids=lambda value: value if isinstance(value, str) else "")
def test_no_picture_accepts_invalid_values(name, function):
    signature, fails = inspect.signature(function), []
    needed = {
        p.name: GOOD.get(p.name)
        for p in signature.parameters.values()
        if p.default is p.empty and p.kind != p.VAR_KEYWORD
    }
    for parameter in signature.parameters.values():
        if parameter.kind == parameter.VAR_KEYWORD:
            continue
        optional = str(parameter.annotation).endswith("| None")
        for value in BAD[kind_of(str(parameter.annotation))]:
            if (optional and value is None) or (parameter.name == "costs" and value == []):
                continue
            given = needed | {parameter.name: value}
            try:
                refused(lambda given=given: function(**given))
            except (AssertionError, pytest.fail.Exception) as error:
                fails.append(f"{name}({parameter.name}={shown(value)}): {str(error).splitlines()[0]}")
            except Exception as error:
                fails.append(f"{name}({parameter.name}={shown(value)}): {type(error).__name__}: {error}")
    assert not fails, "\n".join(fails)
    if not any(p.kind == p.VAR_KEYWORD for p in signature.parameters.values()):
        assert "typo" in refused(lambda: function(**needed, typo=1))


def test_every_public_picture_is_checked():
    for topic in pictures.TOPICS:
        module = getattr(pictures, topic)
        for name, function in vars(module).items():
            if inspect.isfunction(function) and not name.startswith("_") and function.__module__ == module.__name__:
                assert hasattr(function, "__wrapped__"), f"pictures.{topic}.{name} does not check its arguments"


# ---- the checks themselves


def test_shown_never_fails_and_stays_on_one_short_line():
    for value in (Rude(), HUGE, "x" * 10_000, "a\nb", {"x": "y" * 500}, -HUGE):
        assert "\n" not in shown(value) and len(shown(value)) <= 80


def test_numbers_within_bounds_are_taken():
    assert Number(int, 0, 5).check("n", 5) == 5
    assert Number(float, 0, 5).check("n", 5) == 5.0
    assert type(Number(float, 0, 5).read("n", "0.5")) is float
    np = pytest.importorskip("numpy")
    assert Spec("ddp", nproc=np.int64(2)).nproc == 2 and type(Spec("ddp", nproc=np.int64(2)).nproc) is int
