"""Before a run: the expected memory of each rank compared with measurements, and the strip of the Live tab."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from conftest import wait_until
from folded import fold, spec, start, status, step
from generated import ONLY

from labkit.analysis.theory.formulas import STATES, states
from labkit.common.units import size
from labkit.frontends.panel.lab import Lab
from labkit.frontends.panel.predict import Before, plan_html, startup_html
from labkit.plan.spec import Spec
from labkit.training.strategies import STRATEGIES

# Bytes of parameters (the gradients had as many) and of optimizer state, rank by rank, as the probe counted them in
# step 3 on CPU ranks: strategy, workload, ranks, options. The optimizer's include its step counts, 32 bits for each
# tensor.
MEASURED: list[tuple[str, str, int, dict[str, Any], list[tuple[int, int]]]] = [
    ("ddp", "cnn", 2, {}, [(1_623_592, 3_247_224), (1_623_592, 3_247_224)]),
    ("zero1", "mlp", 3, {}, [(2_678_824, 3_211_268), (2_678_824, 2_097_156), (2_678_824, 49_248)]),
    ("zero1", "gpt", 2, {}, [(4_294_144, 4_325_444), (4_294_144, 4_263_184)]),
    ("fsdp", "mlp", 2, {}, [(1_339_412, 2_678_836), (1_339_412, 2_678_848)]),
    ("fsdp", "gpt", 3, {}, [*[(1_431_384, 2_862_880)] * 2, (1_431_384, 2_863_012)]),
    ("fsdp", "mlp", 2, {"sharding": "NO_SHARD"}, [(2_678_824, 5_357_672), (2_678_824, 5_357_672)]),
    ("fsdp", "mlp", 2, {"sharding": "SHARD_GRAD_OP"}, [(1_339_412, 2_678_836), (1_339_412, 2_678_848)]),
    ("fsdp2", "mlp", 3, {}, [(896_040, 1_792_104), (896_040, 1_792_104), (896_040, 1_773_512)]),
    ("fsdp2", "gpt", 2, {}, [(2_147_072, 4_294_484), (2_147_072, 4_294_484)]),
    ("tp", "cnn", 2, {}, [(1_325_864, 2_651_768), (1_325_864, 2_651_768)]),
    ("tp", "gpt", 2, {}, [(2_253_568, 4_507_476), (2_253_568, 4_507_476)]),
    ("pp", "cnn", 3, {}, [(3_328, 6_664), (205_056, 410_120), (1_415_208, 2_830_440)]),
    ("pp", "gpt", 2, {"schedule": "Interleaved1F1B"}, [(2_575_872, 5_151_944), (1_718_272, 3_436_684)]),
    ("pp", "gpt", 2, {"schedule": "ZBVZeroBubble"}, [(1_914_880, 3_829_908), (2_379_264, 4_758_720)]),
    ("ep", "moe", 2, {}, [(12_217_504, 24_435_628)] * 2),
    ("diloco", "mlp", 2, {}, [(5_357_648, 8_036_496)] * 2),
    ("cp", "gpt", 2, {}, [(4_294_144, 8_588_628), (4_294_144, 8_588_628)]),
    ("dp", "mlp", 2, {}, [(2_678_824, 5_357_672)]),
    ("fsdp2_tp", "mlp", 4, {}, [(675_348, 1_350_720)] * 4),
    ("pp_ddp", "gpt", 4, {}, [*[(2_575_872, 5_151_944)] * 2, *[(1_718_272, 3_436_684)] * 2]),
    ("fsdp2", "mlp", 4, {"replicas": 2}, [(1_339_412, 2_678_848)] * 4),
    ("pp_fsdp2_tp", "gpt", 8, {}, [*[(695_424, 1_391_048)] * 4, *[(431_360, 862_860)] * 4]),
]


def asked(strategy: str = "ddp", workload: str = "mlp", nproc: int = 2, **more: Any) -> Spec:
    return Spec(strategy=strategy, workload=workload, nproc=nproc, device="cpu", precision="fp32", **more)


# ---- the formulas


@pytest.mark.parametrize(("strategy", "workload", "nproc", "options", "measured"), MEASURED)
def test_measured_memory_matches_the_formula(strategy, workload, nproc, options, measured):
    found = states(asked(strategy, workload, nproc, options=options, batch_size=16))
    assert [(one.parameters, one.gradients) for one in found] == [(size, size) for size, _ in measured]
    for one, (_, optimizer) in zip(found, measured, strict=True):
        assert 0 <= optimizer - one.optimizer <= 4 * 200, "the rest are step counters"
        assert one.total == one.parameters + one.gradients + one.optimizer


def test_only_an_engine_with_its_own_copies_has_no_formula():
    assert [row.name for row in STRATEGIES.values() if row.states is None] == ["deepspeed"]
    assert {row.states for row in STRATEGIES.values()} - {None} == STATES.keys()
    assert states(asked("deepspeed")) is None


def test_shards_in_cpu_memory_are_not_on_the_device():
    offloaded = states(Spec("fsdp2", "mlp", 2, device="cuda", precision="fp32", options={"cpu_offload": True}))
    assert [one.total for one in offloaded] == [0, 0]


# ---- the strip


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_has_a_plan_with_a_row_for_each_rank_or_says_why_not(strategy):
    spec = asked(strategy, ONLY.get(strategy, "gpt"), STRATEGIES[strategy].default_nproc or 2)
    html = plan_html(spec)
    assert "What each rank will hold and send (by formula)" in html and "Sent per step" in html
    held = states(spec)
    if held is None:
        assert f"There is no memory formula for {spec.strategy_row.title}" in html
        assert "<table" not in html
    else:
        assert html.count("<i style") == spec.processes, "equal ranks share a row, with a colour for each"
        assert all(f"<td>{size(one.total)}</td>" in html for one in held)


def test_what_is_sent_is_the_textbook_s_formula():
    assert "all_reduce 5.1 MiB = 2(n−1)/n · 4P per rank" in plan_html(asked("ddp"))
    assert "Sent per step, all ranks: nothing" in plan_html(asked("single", nproc=1))


def test_the_start_of_a_run_is_a_row_for_each_rank():
    html = startup_html(fold(spec(), status("starting", started=100.0), start(0, 103.0)))
    assert html.count("<tr>") == 3
    assert "<th>torch imported</th>" in html and "<td>3.0 s</td>" in html and "<td>…</td>" in html


def test_the_strip_goes_from_the_plan_to_the_start_and_away():
    strip = Before(lambda: None, lambda spec, plan: None)
    strip.plan(asked("tp"))
    strip.plan(asked("ddp"))
    wait_until(lambda: "DDP" in strip.widget.value)
    assert strip.widget.layout.display == ""
    run = [spec(), status("running", started=100.0), start(0, 103.0), start(1, 103.5), step(0, 1, 104.0)]
    strip.plan(asked("pp"))
    strip.draw(fold(*run))
    strip._compute(strip._newest - 1, asked("pp"))  # its timer
    assert "first step" in strip.widget.value, "a late plan does not replace the run"
    strip.draw(fold(*run, step(1, 1, 104.5)))
    assert (strip.widget.value, strip.widget.layout.display) == ("", "none")


def test_the_plan_follows_the_choices_of_the_panel():
    lab = Lab(strategy="ddp", workload="mlp", nproc=2, device="cpu")
    strip = lab._view._before.widget
    wait_until(lambda: "DDP · mlp on digits · 2 ranks" in strip.value)
    lab._choices.strategy.value = "zero1"
    wait_until(lambda: "ZeRO-1" in strip.value)
    lab._choices.scaling.value = "strong"
    lab._choices.batch.value = 255
    wait_until(lambda: "This configuration cannot run" in strip.value)


def test_the_formulas_load_no_torch():
    code = "import sys; from labkit.frontends.panel.predict import plan_html; from labkit import Spec\n"
    code += "plan_html(Spec('fsdp', 'gpt', 2, device='cpu', precision='fp32')); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
