"""How a script is assembled: what is written in place, which conditions are resolved, and what is left out."""

from __future__ import annotations

import ast

import pytest
from generated import constants, functions, spec

from labkit.plan.script import Definition, in_place, resolved, write_script
from labkit.training.strategies import STRATEGIES
from labkit.training.workloads import WORKLOADS


def test_a_short_function_that_is_called_once_is_written_in_place():
    plain, zero1 = functions(write_script(spec("ddp"))), functions(write_script(spec("zero1")))
    assert "optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)\n" in plain["train"]
    assert "loader = DataLoader(train_data, BATCH_PER_RANK, sampler=sampler, pin_memory=pinned)\n" in plain["train"]
    assert "for batch in loader:\n" in plain["train"]
    assert not {"build_optimizer", "load", "batches_of"} & {*plain}
    assert "optimizer = build_optimizer(model)\n" in zero1["train"] and "build_optimizer" in zero1
    gpt = functions(write_script(spec("tp", workload="gpt")))
    assert "tensor_plans" in gpt and "tensor_plans" not in functions(write_script(spec("tp"))), "one is long"
    assert "positions" in gpt, "it is called in a class"


@pytest.mark.parametrize(
    ("body", "caller", "expected"),
    [
        ("return a + 1", "b = f(a)", "b = a + 1"),
        ("return a + 1", "b = 2 * f(a)", None),
        ("return g(a)", "b = 2 * f(a)", "b = 2 * g(a)"),
        ("c = a + 1  # why\n    return g(c)", "b = f(a)", "c = a + 1  # why\n    b = g(c)"),
        ("c = a + 1\n    return g(c)", "for b in f(a):\n        h(b)", "c = a + 1\n    for b in g(c):\n        h(b)"),
        ("c = a + 1\n    return g(c)", "b = 2 * f(a)", None),
        ("c = a + 1\n    return g(c)", "c = 1\n    b = f(a)", None),
        ("c = d = e = a\n    c = 1\n    d = 2\n    return g(c)", "b = f(a)", None),
        ("g(a)\n    return a + 1", "b = f(a)", None),
        ("return a", "b = f(a)", "b = a"),
        ("a = g(a)\n    return a", "b = f(a)", None),
        ("return a + 1", "b = f(c)", None),
        ("return a + 1", "b = f(a)\n    c = f(a)", None),
    ],
)
def test_what_is_written_in_place(body, caller, expected):
    one = Definition("f", "home", 1, f'def f(a):\n    """Docstring."""\n    {body}', (), None)
    merged = in_place(one, Definition("main", "home", 9, f"def main(a):\n    {caller}", ("f",), None))
    assert (merged and merged.text) == (expected and f"def main(a):\n    {expected}")
    assert merged is None or "f" not in merged.uses


def test_only_used_definitions_are_written():
    assert "SCALER" not in write_script(spec("ddp"))
    assert "import os" in write_script(spec("ddp"))
    assert "distributed as dist" not in write_script(spec("single"))
    assert "torchvision" not in "".join(
        write_script(spec("ddp", workload=name)) for name in WORKLOADS if name != "resnet18"
    )


def test_conditions_on_settings_are_not_in_the_script():
    plain = write_script(spec("ddp"))
    assert not {"DTYPE", "MIXED_PRECISION", "ACCUMULATE", "CLIP_NORM", "COMPILE"} & set(constants(plain))
    full = write_script(spec("ddp", precision="fp16", options={"accumulate": 4, "clip_norm": 1.0, "compile": True}))
    assert constants(full)["ACCUMULATE"] == 4
    assert full.index("SCALER.unscale_(optimizer)\n    clip_gradients(model)\n") > 0
    step = next(node for node in ast.parse(full).body if getattr(node, "name", "") == "train_step")
    assert not [node for node in ast.walk(step) if isinstance(node, ast.If)], "no condition is left"


def test_an_if_is_resolved_completely(tmp_path, monkeypatch):
    body = """def evaluate():
    first = 1
    if SEED == 1:
        first = 2  # one
    elif SEED == 2:
        # two
        if first and SEED:
            first = 3
    else:
        first = 4
    return first
"""
    (tmp_path / "branches.py").write_text("SEED = 0\n\n\n" + body, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    class Branches(type(STRATEGIES["single"])):
        module = "branches"

    row = STRATEGIES["single"]
    monkeypatch.setitem(
        STRATEGIES, "single", Branches(**{name: getattr(row, name) for name in row.__dataclass_fields__})
    )
    written = [functions(write_script(spec("single", seed=seed)))["evaluate"] for seed in (1, 2, 3)]
    assert [text.split("first = 1\n")[1] for text in written] == [
        "    first = 2\n    return first",
        "    if first:\n        first = 3\n    return first",
        "    first = 4\n    return first",
    ]
    assert "        # two\n" not in write_script(spec("single", seed=2))
    assert "    # two\n" in write_script(spec("single", seed=2))


def test_two_meanings_of_one_name_are_refused(tmp_path, monkeypatch):
    (tmp_path / "clash.py").write_text(
        "import json as datetime\n\n\ndef evaluate():\n    datetime.dumps(1)\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)

    class Clash(type(STRATEGIES["single"])):
        module = "clash"

    row = STRATEGIES["single"]
    monkeypatch.setitem(STRATEGIES, "single", Clash(**{name: getattr(row, name) for name in row.__dataclass_fields__}))
    with pytest.raises(ValueError, match="imports datetime as"):
        write_script(spec("single"))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('settings = {"a": 1}\n    return g(b, **settings)', "return g(b, a=1)"),
        ('settings = {"a": 1}\n    settings["c"] = h(b)\n    return g(**settings)', "return g(a=1, c=h(b))"),
        ('settings = {"a": b}\n    h(**settings)\n    return g(**settings)', "h(a=b)\n    return g(a=b)"),
        (
            'settings = {"a": 1}\n    settings["c"] = 2\n    h(**settings)\n    return g(**settings)',
            'settings = {"a": 1, "c": 2}\n    h(**settings)\n    return g(**settings)',
        ),
        ("settings = {}\n    return g(b, **settings)", "return g(b)"),
        ('settings = {"a": 1}  # why\n    return g(**settings)', None),
        ('settings = {"a": 1}\n    return g(settings, **settings)', None),
        ('settings = {"a": 1}\n    if b:\n        settings["c"] = 2\n    return g(**settings)', None),
    ],
)
def test_arguments_are_written_in_their_call(body, expected):
    one = Definition("f", "home", 1, f"def f(b):\n    {body}", (), None)
    assert resolved(one, {}).text == f"def f(b):\n    {expected or body}"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("if ON and b:\n        g(b)", "if b:\n        g(b)"),
        ("if (ON or OFF) and (a or b):\n        g(b)", "if a or b:\n        g(b)"),
        ("if ON and (a or b) and c:\n        g(b)", "if (a or b) and c:\n        g(b)"),
        ("if b and OFF:\n        g(b)\n    h(b)", "h(b)"),
        ("g(a if ON else b, 1)", "g(a, 1)"),
        ("g(a if b else c)", None),
        ("if ON:\n        return a\n    g(b)\n    return b", "return a"),
        ("if OFF:\n        return a\n    return b", "return b"),
        ("if ON:\n        with a:\n            return a\n    return b", "with a:\n        return a"),
        (
            "for c in b:\n        if ON:\n            continue\n        g(c)\n    g(b)",
            "for c in b:\n        continue\n    g(b)",
        ),
        ("é = 'ü'; g(a if ON else b)", "é = 'ü'; g(a)"),
    ],
)
def test_a_condition_on_settings_is_resolved_and_what_is_not_reached_is_left_out(body, expected):
    one = Definition("f", "home", 1, f"def f(a, b, c):\n    {body}", (), None)
    assert resolved(one, {"ON": True, "OFF": False}).text == f"def f(a, b, c):\n    {expected or body}"
