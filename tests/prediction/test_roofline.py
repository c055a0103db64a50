"""The modelled time of kernels and of a step on a named machine, against closed formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from linked import cache, table  # noqa: F401 a fixture
from msgspec import structs
from test_timing import EVERY, Links

import labkit
from labkit.plan.spec import Spec
from labkit.prediction.devices import ACCELERATED, DEVICES
from labkit.prediction.links import communication, store, time_among
from labkit.prediction.predict import predict, programs
from labkit.prediction.timing import (
    ERROR,
    Roofline,
    _bounds,
    modelled,
    of_accelerator,
    program_of,
    simulate,
    with_seconds,
)
from labkit.prediction.tracing.tape import Tape, Work
from labkit.prediction.tracing.torch_private import FAKE_MODE
from labkit.record.documents import Plan, PredictedTimeline, SpecFields
from labkit.setup.machine import Machine

DEVICE = Roofline({"fp32": 1e12, "bf16": 4e12}, 1e11, 1e-6)
GATHER, REDUCE = torch.ops.c10d._allgather_base_.default, torch.ops.c10d.allreduce_.default


def program(call) -> list:
    tape = Tape()
    tape.keeps_kernels = True
    with FAKE_MODE.get()(), tape:
        call()
    return tape.work.program([("forward", 0, tape.mark())])


def kernels(call) -> list:
    """The kernels of a call that do not fill its arguments."""
    return [one for _, _, found in program(call) for one in found]


def test_a_matrix_product_takes_its_flops_and_an_addition_its_bytes():
    rows, inner, columns = 512, 1024, 256
    product = [
        [kind, flops, size, count]
        for kind, flops, size, count in kernels(lambda: torch.empty(rows, inner) @ torch.empty(inner, columns))
    ]
    size = 4 * (rows * inner + inner * columns + rows * columns)
    assert product == [["fp32", 2 * rows * inner * columns, size, 1]]
    assert DEVICE.seconds(product) == pytest.approx(2 * rows * inner * columns / 1e12)
    added = kernels(lambda: torch.empty(1 << 20).add_(torch.empty(1 << 20)))
    assert added == [["fp32", 0, 3 * 4 << 20, 1]]
    assert DEVICE.seconds(added) == pytest.approx((12 << 20) / 1e11)
    assert kernels(lambda: torch.empty(8, 8).view(64).t()) == [], "a view moves nothing"
    assert DEVICE.seconds([["fp32", 0, 4, 5]]) == pytest.approx(5e-6), "a launch is the least"
    looked_up = kernels(lambda: torch.nn.functional.embedding(torch.empty(3, dtype=torch.int64), torch.empty(1000, 8)))
    assert looked_up[0][2] == 2 * 3 * 8 * 4, "only these rows are read"


@pytest.mark.parametrize("name", ACCELERATED)
def test_a_faster_machine_is_never_slower_and_the_range_holds_the_middle(name):
    accelerator = DEVICES[name].accelerator
    work = [["fp32", 1e12, 1e6, 1], ["fp32", 0, 1e9, 2], ["fp32", 1.0, 1.0, 3]]
    least, middle, most = (of_accelerator(accelerator, "fp32", share).seconds(work) for share in (0, 0.5, 1))
    assert least > middle > most
    peaks = {kind: 2 * peak for kind, peak in accelerator.flops.items()}
    for faster in (replace(accelerator, flops=peaks), replace(accelerator, bandwidth=2 * accelerator.bandwidth)):
        assert of_accelerator(faster, "fp32", 0.5).seconds(work) < middle


def test_products_of_fp32_have_the_peak_of_tf32_if_that_is_the_precision():
    accelerator, work = DEVICES["a100x8"].accelerator, [["fp32", 1e12, 0, 1]]
    slow, fast = (of_accelerator(accelerator, precision, 0.5).seconds(work) for precision in ("fp32", "tf32"))
    assert slow / fast == pytest.approx(156 / 19.5)
    with pytest.raises(LookupError, match="no peak is known for matrix products in bf16, only for fp32, fp16"):
        of_accelerator(DEVICES["t4x2"].accelerator, "fp32", 0.5).seconds([["bf16", 1.0, 0, 1]])


# ---- collectives


def started(work: Work, op: str, address: int, func=GATHER, synchronous: bool = False) -> None:
    tensors = [(address, torch.empty(4))]
    work.start(func, (None, None, None, not synchronous), (op, 16, (0, 1)), tensors, tensors)


def computed(work: Work, time: int, *addresses: int) -> None:
    tensors = [(address, torch.empty(4)) for address in addresses]
    work.operation(time, torch.ops.aten.relu.default, 0, tensors, tensors[:1])


def kinds(work: Work) -> list:
    return [one[:2] for one in work.program([("forward", 0, 100)])]


def test_a_collective_is_waited_for_where_its_result_is_used_or_at_once():
    work = Work()
    started(work, "all_gather", 1)
    computed(work, 1, 2)
    computed(work, 2, 3, 1)
    started(work, "all_gather", 4, synchronous=True)
    started(work, "send", 1)
    computed(work, 3, 1)
    assert kinds(work) == [
        *(["start", 0], ["compute", "forward"], ["wait", 0], ["compute", "forward"]),
        *(["start", 1], ["wait", 1], ["start", 2], ["compute", "forward"]),
    ]


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_gather_in_a_stream_of_its_own_is_prefetched_on_gpus(on_gpu):
    work, aside = Work(on_gpu), torch.cpu.Stream()
    for layer in (1, 2):
        with torch.cpu.stream(aside):
            started(work, "all_gather", layer)
        computed(work, layer, 10, layer)
    first = [["start", 0], ["wait", 0]]
    rest = [["start", 1], ["compute", "forward"]] if on_gpu else [["compute", "forward"], ["start", 1]]
    assert kinds(work) == [*first, *rest, ["wait", 1], ["compute", "forward"]]


def test_optimizers_of_gpus_update_all_parameters_together():
    found = []
    for on_gpu in (True, False):
        work = Work(on_gpu)
        for address in range(1, 5):
            computed(work, address, address)
        found += [kernel for *_, each in work.program([("optimizer", 0, 100)]) for kernel in each]
    assert found == [["fp32", 0, 4 * 32, 1], ["fp32", 0, 32, 4]]


def test_a_program_with_seconds_has_the_timeline_of_the_chart():
    items = [["compute", "forward", [["fp32", 5e12, 0, 1]]], ["start", 0, "all_reduce", 3, [0, 1]], ["wait", 0]]
    timed = dict.fromkeys((0, 1), program_of(with_seconds(items, DEVICE)))
    found = simulate(timed, {0: 0, 1: 1}, Links(), None, 3)[0]
    assert found.seconds == pytest.approx(5 + 3)
    assert found.exposed == pytest.approx({"forward": 3.0})
    (call,) = found.comm
    assert (call.op, call.start, call.end, call.bytes) == ("all_reduce", pytest.approx(5), pytest.approx(8), 3)


def test_ranks_on_several_nodes_communicate_between_them():
    model = communication("a100x8")
    inside, between = (time_among(model, "all_reduce", 1 << 20, range(0, ranks)).seconds for ranks in (8, 16))
    assert inside == model.seconds("all_reduce", 1 << 20, 8) and between == model.seconds("all_reduce", 1 << 20, 16, 2)
    assert time_among(model, "send", 1 << 20, (7, 8)).seconds == model.seconds("send", 1 << 20, 2, 2)
    with pytest.raises(LookupError, match="is one node"):
        time_among(communication("t4x2"), "all_reduce", 1, range(4))


# ---- a script of the user's own


SCRIPT = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.ones(256, 64)).sum().backward()
    optimizer.step()
"""


def test_the_step_of_an_own_script_is_modelled_here_and_elsewhere(cache, tmp_path):  # noqa: F811
    (tmp_path / "train.py").write_text(SCRIPT)
    spec = Spec(script=str(tmp_path / "train.py"), nproc=2, device="cpu")
    with pytest.raises(LookupError, match="communication over gloo has not been measured"):
        labkit.predict(spec, machine="here")
    here, links = Machine.here(), dict.fromkeys(EVERY, ((1024, 0.001), (1 << 26, 0.1)))
    known = structs.replace(table(2, **links), machine=here.hardware, torch=here.torch_version)
    store(known)
    with pytest.raises(LookupError, match="what kernels reach on this machine has not been measured; measure it with"):
        labkit.predict(spec, machine="here")
    store(structs.replace(known, peaks={"fp32": 1e9}, kernels={"copies": 1e9, "launch": 1e-5}))
    found = labkit.predict(spec, machine="here")
    time = found.plan.time
    product = 2 * 256 * 64 * 32
    assert 2 * product / 1e9 + 0.001 < time.low < time.seconds < time.high < 1
    assert time.modelled and time.samples_per_second is None
    assert "modelled for this machine, 2 gloo ranks" in found.title and "TFLOP/s" in found.title
    items = [one for one in programs(spec)[0] if one[0] != "compute"]
    assert items == [["start", 0, "all_reduce", 4 * (64 * 32 + 32), [0, 1]], ["wait", 0]]
    elsewhere = modelled(spec, predict(spec), DEVICES["a100x8"]).time
    assert elsewhere.modelled and elsewhere.high < time.low


def test_a_step_that_cannot_be_modelled_says_why():
    plan = Plan(SpecFields(), "formula", [], [], reason="it failed")
    spec = Spec("fsdp2", "mlp", nproc=2, device="cuda", precision="fp32", batch_size=16)
    found = modelled(spec, plan, DEVICES["a100x8"])
    assert found.untimed == "there is no time of a step: it needs a trace, and it failed"
    offload = replace(spec, options={"cpu_offload": True})
    assert "not modelled with cpu_offload" in modelled(offload, plan, DEVICES["a100x8"]).untimed
    with pytest.raises(ValueError, match="precision on NVIDIA T4 must be one of fp32, fp16, got 'bf16'"):
        modelled(replace(spec, precision="bf16"), plan, DEVICES["t4x2"])


def test_the_uncertainty_of_a_step_adds_independent_errors():
    step = PredictedTimeline(2.0, [], [], [], {"backward": 0.5}, low=1.9, high=2.3)
    low, high = _bounds(step, 0.2, 0.25)
    assert 2 - low == pytest.approx((0.1**2 + (0.2 * 0.5) ** 2 + (2 * ERROR) ** 2 + 0.5**2) ** 0.5)
    assert high - 2 == pytest.approx((0.3**2 + (0.2 * 0.5) ** 2 + (2 * ERROR) ** 2 + 0.5**2) ** 0.5)
