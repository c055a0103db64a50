"""The load of experts: what the ranks log, its chart, and the finding about an uneven one."""

from __future__ import annotations

import pytest
import torch
from folded import apply, fold, spec, start

from labkit import figures
from labkit.analysis.diagnose import findings
from labkit.analysis.metrics import expert_loads, summed
from labkit.figures import chart, live, of_run
from labkit.frontends.panel.charts import LIVE, Feed
from labkit.training.workloads import WORKLOADS, gpt, moe


def logged(rank: int, step: int, *loads: int) -> list[dict]:
    """What one rank logs in a step: the choices of each expert."""
    return [
        {"kind": "metric", "rank": rank, "t": 10.0 + step, "name": f"expert {number}", "value": load, "step": step}
        for number, load in enumerate(loads)
    ]


def state(*events: dict):
    return fold(spec(strategy="ep", workload="moe"), start(0), start(1), *events)


def uneven(of) -> list:
    return [one for one in findings(of) if one.name == "uneven_experts"]


def test_the_newest_step_that_all_ranks_logged_counts():
    folded = state(*logged(0, 1, 9, 1), *logged(1, 1, 9, 1), *logged(0, 20, 4, 6), *logged(1, 20, 2, 8))
    apply(folded, logged(0, 40, 10, 0)[0])  # rank 1 has not logged it yet
    step, loads = expert_loads(folded)
    assert (step, loads) == (20, {0: {0: 4, 1: 6}, 1: {0: 2, 1: 8}})
    assert summed(loads) == {0: 6, 1: 14}
    drawn = chart("experts", folded)
    assert drawn.x.categories == ("0", "1") and [bars.values for bars in drawn.bars] == [(4, 6), (2, 8)]
    assert drawn.marks[0].values == (10, 10) and "step 20" in drawn.note
    assert live(folded) == of_run(folded) == (*figures.LIVE, "experts")
    overview = figures.overview(folded)
    assert [note.text.count("Choices per expert") for note in overview.layout.annotations].count(1) == 1
    assert overview.layout.height == 840, "a third row"


def test_a_run_without_experts_has_an_empty_chart_that_is_not_shown():
    folded = state({"kind": "metric", "rank": 0, "t": 1.0, "name": "accuracy", "value": 0.5, "step": 20})
    assert expert_loads(folded) == (0, {})
    assert not chart("experts", folded).bars and "experts" not in of_run(folded)
    assert Feed(LIVE).message(folded)["names"] == []  # axes without data say nothing
    assert live(folded) == figures.LIVE


def test_the_panel_shows_the_load_as_soon_as_it_is_logged():
    folded, feed = state(), Feed(LIVE)
    assert "experts" not in feed.message(folded)["names"]
    for event in (*logged(0, 1, 3, 7), *logged(1, 1, 5, 5)):
        apply(folded, event)
    message = feed.message(folded)
    assert message["names"] == ["experts"]
    (update,) = [one for one in message["charts"] if one["name"] == "experts"]
    assert [trace["y"] for trace in update["whole"]["data"][:2]] == [[3, 7], [5, 5]]
    feed.restart()
    assert "experts" not in feed.message(state())["names"], "another run, which has none"


@pytest.mark.parametrize(
    ("step", "loads", "found"),
    [(20, (50, 10, 10, 10), True), (19, (50, 10, 10, 10), False), (20, (30, 20, 20, 10), False)],
)
def test_an_expert_that_is_chosen_twice_as_often_as_the_mean_is_a_finding_after_some_steps(step, loads, found):
    one = uneven(state(*logged(0, step, *loads), *logged(1, step, *loads)))
    assert bool(one) == found
    if found:
        assert one[0].title == "expert 0 is chosen 2.5 times as often as the mean of the experts"
        assert "100 choices of expert 0, 40 per expert" in one[0].evidence and "balance" in one[0].fix


# ---- the model


def test_a_mixture_drops_what_finds_no_slot_and_does_not_look_ahead(monkeypatch):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*moe.build_blocks())
    tokens = torch.randint(256, (2, gpt.CONTEXT))
    logits, later = model(tokens), tokens.clone()
    later[:, 64:] = 0
    torch.testing.assert_close(model(later)[:, :64], logits[:, :64])
    assert sum(mixture.load.sum() for mixture in moe.mixtures(model)) == 2 * 2 * gpt.CONTEXT * gpt.LAYERS
    vectors, mixture = torch.randn(1, 16, gpt.WIDTH), moe.Mixture(gpt.WIDTH)
    with torch.no_grad():
        mixture.router.bias[3] = 50.0  # every vector is sent to expert 3, with a weight of 1
    monkeypatch.setattr(moe, "TOP_K", 1)
    monkeypatch.setattr(moe, "CAPACITY_FACTOR", 2.0)
    result, taken = mixture(vectors), 2 * 16 // moe.EXPERTS
    torch.testing.assert_close(result[:, :taken], mixture.experts["3"](vectors[:, :taken]))
    assert not result[:, taken:].any() and mixture.load.tolist() == [0, 0, 0, 16, 0, 0, 0, 0]
    assert mixture.balance.item() == pytest.approx(moe.EXPERTS)  # 1 if the load is even


def test_options_and_constants_of_a_mixture_agree():
    options = {option.name.upper(): option.default for option in WORKLOADS["moe"].options}
    own = ("EXPERTS", "TOP_K", "CAPACITY_FACTOR", "BALANCE")
    assert {name: getattr(moe, name) for name in own} == {name: options[name] for name in own}
