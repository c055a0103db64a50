"""FLOPs of a step, counted in traces, against closed formulas."""

from __future__ import annotations

import pytest
from test_prediction import apart as apart
from test_prediction import spec_of

from labkit.analysis.theory.formulas import six_nd
from labkit.plan.spec import Spec
from labkit.prediction.predict import predict, programs
from labkit.prediction.scale.model import of_workload

CNN_INPUTS = 2 * 25 * 32 * 28**2  # of the first convolution, whose input needs no gradient
BATCH = 4


def gpt(strategy: str, **fields) -> Spec:
    return spec_of(strategy, workload="gpt", batch_size=BATCH, **fields)


def of_ranks(plan) -> list[float]:
    return [rank.flops for rank in plan.ranks]


def recomputed(spec: Spec, blocks: bool) -> float:
    """FLOPs that backward repeats: the scores of attention, 2·T²·d per layer and sample, and with activation
    checkpointing all of a layer up to its last matrix, 2·4d·d·T, whose output nothing needs."""
    row = spec.workload_row.transformer(spec.options)
    scores = 2 * row.positions**2 * row.width
    layer = spec.workload_row.costs(spec.options)[1]
    again = blocks * (layer - 8 * row.width**2 * row.positions)
    return spec.global_batch * row.layers * (scores + again)


def test_cnn_executes_three_times_its_forward_pass_without_the_gradient_of_its_input():
    spec = spec_of("ddp", workload="cnn", batch_size=BATCH)
    plan = predict(spec)
    each = 3 * sum(spec.workload_row.costs(spec.options)) - CNN_INPUTS
    assert of_ranks(plan) == [BATCH * each] * 2
    assert [one.recomputed_flops for one in plan.ranks] == [0, 0]
    assert plan.model_flops == 2 * BATCH * each
    assert plan.six_nd is None
    kernels = [one for item in programs(spec)[0] if item[0] == "compute" for one in item[2]]
    assert sum(flops * count for _, flops, _, count in kernels) == BATCH * each


def test_gpt_executes_three_times_its_forward_pass_and_the_scores_again():
    spec = gpt("single")
    plan, model = predict(spec), of_workload("gpt", {})
    assert plan.model_flops == BATCH * model.positions * model.training_flops(model.positions)
    assert plan.ranks[0].recomputed_flops == recomputed(spec, blocks=False)
    assert of_ranks(plan) == [plan.model_flops + recomputed(spec, blocks=False)]
    assert plan.six_nd == six_nd(spec) == 6 * BATCH * model.positions * model.layers * model.of_layer()


def test_tensor_parallel_ranks_have_their_shares_and_recompute_the_blocks():
    spec = gpt("tp", options={"checkpoint_activations": True})
    plan = predict(spec)
    again = recomputed(spec, blocks=True)
    assert sum(one.recomputed_flops for one in plan.ranks) == again
    assert of_ranks(plan) == [(plan.model_flops + again) / 2] * 2
    assert plan.model_flops == predict(gpt("single")).model_flops


def test_what_every_tensor_parallel_rank_computes_counts_once_as_the_models():
    spec = spec_of("tp", workload="cnn", batch_size=BATCH)
    plan, alone = predict(spec), predict(spec_of("single", workload="cnn", batch_size=BATCH))
    assert plan.model_flops == alone.model_flops < sum(of_ranks(plan))
    split = BATCH * 3 * sum(spec.workload_row.costs(spec.options)[3:]) // 2
    assert of_ranks(plan) == [alone.model_flops - split] * 2


@pytest.mark.parametrize("strategy", ["pp", "cp"])
def test_ranks_that_share_samples_execute_the_model_together(strategy):
    spec = gpt(strategy)
    plan = predict(spec)
    assert sum(of_ranks(plan)) == plan.model_flops + recomputed(spec, blocks=False)


def test_a_script_of_the_users_own_executes_what_its_ranks_compute(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "from torch.utils.checkpoint import checkpoint\n"
        "model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(4):\n"
        "    optimizer.zero_grad()\n"
        "    checkpoint(model, torch.ones(32, 8), use_reentrant=False).sum().backward()\n"
        "    optimizer.step()\n"
    )
    plan = predict(Spec(script=str(script), nproc=2, device="cpu"))
    first, second = 2 * 32 * 8 * 16, 2 * 32 * 16 * 4
    each = 2 * first + 3 * second  # the input needs no gradient
    assert plan.model_flops == 2 * each
    assert [(one.flops, one.recomputed_flops) for one in plan.ranks] == [(each + first, first)] * 2
