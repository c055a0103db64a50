"""What the speed of a run means for its devices: tokens per second, model FLOP/s per device, and MFU. One definition,
for what was measured and for what is predicted.

Model FLOPs are those that forward and backward of a step need, without recomputation, as counted in the trace of the
prediction. Their number divided by the median seconds of a step, of the slowest rank, and by the devices is the FLOP/s
per device. MFU (model FLOPs utilisation: Chowdhery et al. 2022, appendix B) is its share of the device's peak. A run
without a prediction has neither, because its FLOPs were not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.analysis.metrics import step_seconds, throughput
from labkit.analysis.theory.states import SIX_ND, tokens_of_a_sample
from labkit.common.units import significant
from labkit.plan.spec import Spec
from labkit.record.documents import Plan
from labkit.record.state import RunState, per_revision


@dataclass(frozen=True)
class Efficiency:
    """Per second: samples and tokens of all ranks, model FLOPs of a device; and MFU. Unknown values are None, and
    `mfu_missing` says why FLOP/s or MFU are; it is empty if they are known, and until the speed is."""

    samples_per_second: float | None
    tokens_per_second: float | None
    flops_per_device: float | None
    mfu: float | None
    mfu_missing: str

    @property
    def words(self) -> list[str]:
        """Those that are known: `1,650 samples/s`, `211,200 tokens/s`, `0.0512 TFLOP/s per device`, `MFU 31.0 %`."""
        found = []
        if self.samples_per_second is not None:
            found.append(f"{self.samples_per_second:,.0f} samples/s")
        if self.tokens_per_second is not None:
            found.append(f"{self.tokens_per_second:,.0f} tokens/s")
        return found + ([f"{each} per device" for each in (self.computed,) if each])

    @property
    def computed(self) -> str:
        """`0.0512 TFLOP/s, MFU 31.0 %`; empty if unknown."""
        if self.flops_per_device is None:
            return ""
        said = f"{significant(self.flops_per_device / 1e12)} TFLOP/s"
        return said + (f", MFU {100 * self.mfu:.1f} %" if self.mfu is not None else "")


@per_revision
def efficiency(state: RunState, now: bool = False) -> Efficiency:
    """Of a run, as measured; with `now`, over the newest steps as in `metrics`."""
    steps = [step_seconds(state, number, now) for number in state.ranks]
    slowest = max((one for one in steps if one), default=None) if None not in steps else None
    return _efficiency(state.asked, state.prediction, throughput(state, now), slowest)


def predicted_efficiency(plan: Plan, spec: Spec | None) -> Efficiency:
    """Of the prediction of a Spec; nothing is known without the time of a step."""
    time = plan.time
    speed, seconds = (time.samples_per_second, time.seconds) if time else (None, None)
    return _efficiency(spec, plan, speed, seconds)


def _efficiency(spec: Spec | None, plan: Plan | None, speed: float | None, seconds: float | None) -> Efficiency:
    each = tokens_of_a_sample(spec) if spec else None
    tokens = speed * each if speed is not None and each else None
    if not seconds:
        return Efficiency(speed, tokens, None, None, "")
    if plan is None or plan.model_flops is None:
        return Efficiency(speed, tokens, None, None, f"FLOP/s are not known: {_without_flops(plan)}")
    flops = plan.model_flops / seconds / (plan.spec.nproc or 1)
    peak = plan.peak
    if peak is None or not peak.flops:
        why = peak.source if peak else "the prediction has no peak of the device"
        return Efficiency(speed, tokens, flops, None, f"MFU is not known: {why}")
    return Efficiency(speed, tokens, flops, flops / peak.flops, "")


def _without_flops(plan: Plan | None) -> str:
    if plan is None:
        return "they are counted by a prediction, and the run has none; predict it before it runs"
    is_traced = plan.method == "simulated"
    return "the prediction is of an earlier version" if is_traced else "the script could not be traced"


# ---- in words


def against_prediction(state: RunState, plan: Plan) -> list[str]:
    """Model FLOP/s and MFU, measured and predicted, and the peak or why it is not known; none without FLOPs."""
    measured, predicted = efficiency(state), predicted_efficiency(plan, state.asked)
    if not measured.computed:
        return []
    against = f"; {predicted.computed} was predicted" if predicted.computed else ""
    peak = measured.mfu_missing or (f"Peak: {plan.peak.source}" if plan.peak else "")
    return [f"Per device, {measured.computed} was measured{against}. {peak}."]


def flops_in_words(plan: Plan) -> str:
    """The model FLOPs of a step, what the ranks execute, and the textbook's estimate."""
    count = plan.model_flops
    if not count:
        return ""
    executed = sum(rank.flops or 0 for rank in plan.ranks)
    again = sum(rank.recomputed_flops or 0 for rank in plan.ranks)
    said = f"Model FLOPs of a step: {_gflop(count)}; all ranks execute {_gflop(executed)}"
    said += f", of which {_gflop(again)} recompute" if again else ""
    estimate = plan.six_nd
    said += f". 6ND: {_gflop(estimate)} ({estimate / count - 1:+.0%}), {SIX_ND}" if estimate else ""
    missing = predicted_efficiency(plan, plan.spec.to_spec()).mfu_missing
    return ". ".join(filter(None, (said, missing))) + "."


def _gflop(count: float) -> str:
    return f"{significant(count / 1e9)} GFLOP"
