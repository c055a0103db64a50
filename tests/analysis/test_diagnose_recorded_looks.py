"""What looks may record, and the findings about it; test_diagnose_looks.py has trainings of two ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from diagnosed import ddp, first, looks, names, saw, script, start, tracked, traffic
from folded import fold

from labkit.analysis.diagnose import findings
from labkit.probe.looks import _normalised_twice
from labkit.probe.optimizers import edge_of
from labkit.record.state import RunState


def state_with(*events: object, ranks: int = 2, **fields: object) -> RunState:
    """Ranks of one DDP with these fields in their looks, and further events."""
    trained = [[tracked(rank, list(range(ranks))), *looks(rank, **fields)] for rank in range(ranks)]
    return fold(script(ranks), start(*range(ranks)), *trained, *events)


ALWAYS = (
    ("gradients_kept", {"kept": lambda step: step > 1}),
    ("clipped_scaled", {"scaled": True}),
    ("clipped_late", {"late": lambda step: step > 1}),
    ("normalised_twice", {"twice": ("cross_entropy", "softmax")}),
)


@pytest.mark.parametrize(("name", "fields"), ALWAYS)
def test_what_every_step_does_is_found(name, fields):
    assert names(state_with(**fields)) == [name]


@pytest.mark.parametrize(("name", "fields"), ALWAYS)
def test_what_some_steps_or_ranks_do_is_not_found(name, fields):
    ((field, value),) = fields.items()
    assert names(state_with(**fields, at=(0, 1, 2))) == []  # too few
    assert names(state_with(**{field: lambda step: value if step % 2 and not callable(value) else None})) == []
    first_rank = [tracked(0, [0, 1]), *looks(0, **fields)]
    assert names(fold(script(), start(0, 1), first_rank, [tracked(1, [0, 1]), *looks(1)])) == []


def test_a_model_that_stays_in_evaluation_mode():
    assert "from step 3 on" in first(state_with(evaluating=lambda step: step > 2), "stays_in_evaluation").title
    between = first(state_with(evaluating=lambda step: step > 4, at=(0, 1, 4, 6, 8, 12)), "stays_in_evaluation")
    assert "between 5 and 6" in between.title and "True up to step 4" in between.evidence


@pytest.mark.parametrize("evaluating", [True, lambda step: step in (3, 4), lambda step: step > 6])
def test_a_model_that_never_left_it_or_came_back(evaluating):
    assert names(state_with(evaluating=evaluating)) == []


RATES = (1.0, 1.0, 1.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0)


def state_of_rates(*rates: float) -> RunState:
    """All steps are looked at; `rates` are their learning rates."""
    return state_with(
        at=range(len(rates) + 1),
        settings=lambda step: {"lr of group 0": rates[step - 1] if step else 1.0, "lr of group 1": 0.0},
        rates=lambda step: sum(rates[:step]),
    )


def test_a_learning_rate_that_is_0_long_before_the_end():
    found = first(state_of_rates(*RATES), "schedule_over")
    assert "0 from step 6 on" in found.title and "1 at most, 0.5 in step 5" in found.evidence


@pytest.mark.parametrize(
    "rates",
    [RATES[:7], (0.0,) * 10, (*RATES, 1e-3), (1.0,) * 40 + (0.0,) * 4],
    ids=["just now", "never one", "comes back", "at the end"],
)
def test_a_learning_rate_that_comes_back_or_ends_with_the_training(rates):
    assert "schedule_over" not in names(state_of_rates(*rates))


def stream(rank: int, workers: int, *digests: str) -> list[dict]:
    loader = saw(rank, "loader", batches=None, samples=None, sampler=None, workers=workers, streams=True)
    return [loader, *(saw(rank, "batch", step=step, digest=f"{rank}{each}") for step, each in enumerate(digests, 1))]


@pytest.mark.parametrize(("workers", "digests"), [(2, "aab"), (3, "aaab"), (4, "aaaabbb")])
def test_workers_that_return_the_same_samples(workers, digests):
    found = first(state_with(*(stream(rank, workers, *digests) for rank in (0, 1))), "repeated_stream")
    assert f"the first {workers} batches" in found.evidence


@pytest.mark.parametrize(("workers", "digests"), [(2, "aba"), (2, "aaa"), (2, "aa"), (1, "aab"), (3, "aabb")])
def test_workers_that_may_do_so(workers, digests):
    assert names(state_with(*(stream(rank, workers, *digests) for rank in (0, 1)))) == []


PAIRS = {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}  # the group of each rank


@pytest.mark.parametrize("what", ["batch", "input"])
@pytest.mark.parametrize(("samples", "named"), [("aabb", True), ("aaaa", False), ("abab", False), ("abcd", False)])
def test_a_group_that_averages_gradients_of_the_same_samples(what, samples, named):
    """Ranks 0 and 1 share one DDP, and 2 and 3 another one, as beside tensor parallelism."""
    events = [[*ddp(rank), tracked(rank, group), *looks(rank)] for rank, group in PAIRS.items()]
    seen = [saw(rank, what, step=step, digest=f"{step}{samples[rank]}") for rank in PAIRS for step in (1, 2, 3)]
    found = findings(fold(script(4), start(*PAIRS), *events, seen))
    assert [(finding.name, finding.ranks) for finding in found] == ([("same_samples", (0, 1))] if named else [])


@pytest.mark.parametrize(
    ("sent", "part", "named"), [(36, 0.0, True), (40, 0.0, True), (136, 0.0, False), (36, 1.0, False)]
)
def test_gradients_of_the_same_samples_averaged_by_hand(sent, part, named):
    events = [[tracked(rank), *looks(rank, part=part * rank), traffic(rank, all_reduce=(2, sent))] for rank in (0, 1)]
    seen = [saw(rank, "batch", step=step, digest=str(step)) for rank in (0, 1) for step in (1, 2, 3)]
    assert ("same_samples" in names(fold(script(), start(0, 1), *events, seen))) == named


@pytest.mark.parametrize(
    ("elements", "named"), [(lambda rank: 4 + 4 * rank, True), (lambda rank: 8, False), (lambda rank: None, True)]
)
def test_weights_that_differ_only_by_a_factor_are_no_different_numbers(elements, named):
    """Mixup multiplies the two terms of its loss by random numbers."""
    weighted = [
        [tracked(rank, [0, 1]), *looks(rank, weight=0.1 + 0.2 * rank, elements=elements(rank))] for rank in (0, 1)
    ]
    assert names(fold(script(), start(0, 1), *weighted)) == (["unequal_weights"] if named else [])


LOGITS = torch.ones(4, 3, requires_grad=True) * 2
LABELS = torch.tensor([0, 1, 2, 0])


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (F.cross_entropy(LOGITS.softmax(1), LABELS), ("cross_entropy", "softmax")),
        (F.nll_loss(LOGITS.softmax(1), LABELS) / 2, ("cross_entropy", "softmax")),
        (F.cross_entropy(LOGITS.softmax(1).view(2, 2, 3).flatten(0, 1), LABELS), ("cross_entropy", "softmax")),
        (
            F.binary_cross_entropy_with_logits(LOGITS.sigmoid(), torch.ones(4, 3)),
            ("binary_cross_entropy_with_logits", "sigmoid"),
        ),
        (F.cross_entropy(LOGITS, LABELS), None),
        (F.nll_loss(LOGITS.softmax(1).log(), LABELS), None),
        (F.nll_loss(LOGITS.log_softmax(1), LABELS), None),
        (F.cross_entropy(LOGITS.softmax(1) @ torch.eye(3), LABELS), None),
        (F.binary_cross_entropy(LOGITS.sigmoid(), torch.ones(4, 3)), None),
        (F.mse_loss(LOGITS.softmax(1), torch.ones(4, 3)), None),
    ],
)
def test_a_loss_of_probabilities_that_expects_logits(loss, told):
    assert _normalised_twice(edge_of(loss)) == told
