"""Every public name validates its arguments: one sentence that names the value, immediately, and nothing is started."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from arguments_of import DDP, FLAGS, HUGE, NUMBERS, PATHS, SMALL, STARTING, TEXTS, Rude, refused
from fabricate import FakeRun

import labkit
from labkit import (
    Lab,
    Run,
    Spec,
    advise,
    atlas,
    check,
    classroom,
    compare,
    diff_scripts,
    excerpt,
    explain,
    guess,
    on_trial,
    place,
    predict,
    run,
    show,
    starter,
)
from labkit.analysis.diagnose import NAMES
from labkit.common.arguments import Number, shown
from labkit.course import pictures
from labkit.frontends.magic import report
from labkit.frontends.magic.cell import Cell, CellError

# ---- the other public names


def each(text: str, values: tuple, call: Callable[[Any], Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The same call with each of some values."""
    for value in values:
        yield f"{text}({shown(value)})", partial(call, value)


def calls(fake: Run) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Public names with invalid arguments."""
    yield from _of_runs(fake)
    yield from _of_the_course(fake.folder.path.parent)


def _of_runs(fake: Run) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield from each("run", ("", "ddpp", None, 5, b"ddp", [], "nowhere.py", "\0.py", "x" * 5000 + ".py", Rude()), run)
    yield from each("run script=", ("train.py",), lambda value: run("ddp", script=value))
    yield from each("run detached=", FLAGS, lambda value: run(DDP, detached=value))
    yield from each("run stdin=", ("x", 1.5, -1, 10**6, HUGE, True, [], Rude()), lambda value: run(DDP, stdin=value))
    yield from each(
        "run as_module", ("", "a/b.py", "nowhere.at.all", "1", ".", "a."), lambda value: run(value, as_module=True)
    )
    yield from each("predict", ("", "ddpp", None, 5, b"ddp", [], "train.py", Rude()), predict)
    yield from each("predict links=", ("", "typo", 5, [], Rude()), lambda value: predict(DDP, links=value))
    figures = ("", "peak", "ddp", 5, [], Rude())
    yield from each("guess figure", figures, lambda value: guess(value, 40))
    wrong = (-1, math.nan, math.inf, HUGE, "40", [], {}, [1, None], {-1: 3}, {"0": 3}, {5000: 3}, True, Rude())
    yield from each("guess value", wrong, lambda value: guess("peak_mb", value))
    yield from each("guess one value", ([1, 2], {0: 1}), lambda value: guess("loss", value))
    yield from each("guess strategies", ({"ddpp": 1}, {"ddp": -1}, {0: 1}), lambda value: guess("speedup", value))
    yield "guess a share above 100 %", lambda: guess("accuracy_percent", 101)
    yield "predict a figure", lambda: predict("peak_mb")
    yield from each("explain", (None, 5, b"x", "", "nowhere", "\0", "x" * 5000, [], Rude()), explain)
    yield "explain nothing", explain
    yield from each("place", NUMBERS, place)
    yield from each("compare", ("", "typo", None, 5, [], [5], [[]], ["ddp", "typo"], {"typo": 1}, Rude()), compare)
    yield from each("compare all nproc=", (0, -1, math.nan, HUGE), lambda value: compare("all", nproc=value))
    yield from each("compare script=", ("train.py",), lambda value: compare("all", script=value))
    yield from each(
        "advise", ("", "typo", "7 B B", 0, -1, 10**20, HUGE, math.nan, True, None, b"7B", [], Rude()), advise
    )
    for name in ("config", "workload"):
        yield from each(
            f"advise {name}=", (*PATHS, "typo", "x" * 5000), lambda value, name=name: advise(**{name: value})
        )
    for name in ("devices", "sequence", "batch", "memory"):
        yield from each(
            f"advise {name}=",
            (0, -1, 1.5, math.nan, 10**20, HUGE, "", "typo", True, [], Rude()),
            lambda value, name=name: advise("7B", **{name: value}),
        )
    for name in ("machine", "precision", "attention"):
        texts = (value for value in TEXTS if value is not None)
        yield from each(f"advise {name}=", tuple(texts), lambda value, name=name: advise("7B", **{name: value}))
    yield from each(
        "advise options=", ({"size": "9B"}, {"typo": 1}), lambda value: advise(workload="gpt", options=value)
    )
    for name in ("model", "gpu_type", "source", "layout"):
        texts = tuple(value for value in TEXTS if value is not None)
        yield from each(f"atlas {name}=", texts, lambda value, name=name: atlas(**{name: value}))
    wrong = (0, -1, 1.5, math.nan, 10**20, HUGE, "", "typo", True, [], [8, "x"], Rude())
    yield from each("atlas gpus=", wrong, lambda value: atlas(gpus=value))
    yield from each("show", (None, 5, b"x", "", "typo", "\0", "x" * 5000, [], Rude()), show)
    yield from each("Run", (None, "last", 5), Run)
    yield from each("Run.attach", (None, 5, b"x", "", "typo", "\0", "x" * 5000, Rude()), Run.attach)
    yield from each("wait until=", ("typo", "", 5, [], "x" * 5000, Rude()), lambda value: fake.wait(until=value))
    yield from each(
        "wait timeout=", (-1, math.nan, math.inf, "5", 1e300, True, [], Rude()), lambda value: fake.wait(timeout=value)
    )
    yield from each("figure", TEXTS, fake.figure)
    yield from each("capture", FLAGS, fake.capture)
    yield from each("export to=", ("tensorboard,csv", *TEXTS), fake.export)
    yield from each("export out=", PATHS, lambda value: fake.export("csv", value))
    yield from each("run export=", tuple(value for value in TEXTS if value), lambda value: run(DDP, export=value))
    yield from each("logs rank=", (-1, 2, 10**20, HUGE, 1.5, "0", True, None, []), fake.logs)
    yield from each("logs stream=", TEXTS, lambda value: fake.logs(0, value))


def _of_the_course(folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield from each("classroom", (None, 5, b"x", "", "nowhere", "\0", "x" * 5000, [], Rude()), classroom)
    yield from each("classroom grades=", PATHS, lambda value: classroom(folder, grades=value))
    times = tuple(value for value in NUMBERS if value != 1.5)  # seconds and minutes may have fractions
    for name, values in {"minutes": times, "every": times, "hide_names": FLAGS}.items():
        yield from each(f"classroom {name}=", values, lambda value, name=name: classroom(folder, **{name: value}))
    for name in ("write_script", "excerpt"):
        yield from each(name, ("ddp", None, 5, {}, Rude()), getattr(labkit, name))
    yield from (("diff_scripts", partial(diff_scripts, *pair)) for pair in (("ddp", DDP), (DDP, None)))
    yield "excerpt without names", lambda: excerpt(DDP)
    yield from each("excerpt", ("", "typo", 5, None, [], "x" * 5000), lambda value: excerpt(DDP, value))
    yield from each("check", (None, 5, "", "typo", "ddp.typo", [], "x" * 5000), lambda value: check(value, 1))
    yield from each("starter", (None, 5, "", "typo", "ddp.typo", "ddp.steps", [], "x" * 5000), starter)
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
    "points": {"a": [1.0, 2.0]},
    "peak": 1e9,
    "bandwidth": 1e9,
    "saving": 30.0,
    "restart": 300.0,
    "replicas": 3,
    "clusters": [1024, 16384],
    "pairs": [[1.0, 5.0], [2.0, 3.0]],
    "small": [3.0],
    "large": [2.0],
    "transfer": 0.1,
    "batch": 8,
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


@pytest.mark.parametrize(("name", "function"), [*drawn()], ids=lambda value: value if isinstance(value, str) else "")
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
        for name in getattr(module, "__all__", vars(module)):
            function = getattr(module, name)
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
