"""Claims on trial: common claims about distributed training, each run or computed here, with a verdict and evidence.

If this machine cannot decide a claim, the verdict says so: CPU ranks cannot decide claims about GPUs.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from labkit.common.arguments import ROUNDS, check_flag, check_type, shown
from labkit.course.claims import computed, measured
from labkit.course.claims.measured import Claim, Trials, Verdict, Verdicts
from labkit.runs.notebook import in_notebook
from labkit.setup.machine import Machine
from labkit.setup.progress import Progress

if TYPE_CHECKING:
    from IPython.display import DisplayHandle

__all__ = ["CLAIMS", "computed", "measured", "on_trial"]

_ORDER = (  # of the page
    "cnn-parameters", "batch", "fsdp-all-reduce", "nccl-macos", "fsdp-memory", "two-gpus", "ddp-dp", "dp-small",
    "fsdp-small", "pin-memory", "scaling", "65b", "7b", "1b-10b", "2-gb", "speedup-129", "ddp-overhead",
    "overhead", "fsdp-scaling", "fsdp-16", "tp-node", "micro-batch", "pipeline-4x", "fsdp-8", "tp-batch",
    "dtensor-all-to-all", "cpu-average", "dp-copies", "devices", "colab", "rank-0-accuracy", "sum", "wrap-1m",
    "set-device", "rank-0-download", "optimizer-order", "evaluate-module",
)  # fmt: skip
CLAIMS: dict[str, Claim] = {name: measured.CLAIMS[name] for name in _ORDER}


def on_trial(*names: str, quick: bool = False, rounds: int = 3) -> Verdicts:
    """The verdicts on the claims called `names` (default: all).

    `quick` skips claims that need runs. The runs alternate, `rounds` times each. The call blocks until they end, and
    they stay among the recorded runs. Raises `LookupError` for an unknown claim, and `ValueError` if `rounds` is not
    positive or if `quick` skips all chosen claims.
    """
    check_flag("quick", quick)
    rounds = ROUNDS.check("rounds", rounds)
    claims = list(dict.fromkeys(map(_claim, names))) or list(CLAIMS.values())
    chosen = [claim for claim in claims if not (quick and claim.needs)]
    if not chosen:
        raise ValueError(f"{claims[0].name} needs runs, which quick skips; remove quick")
    trials = Trials(Machine.here())
    with _Line() if in_notebook() else Progress() as progress:
        trials.run((job for claim in chosen for job in claim.needs), rounds, progress)
        verdicts = []
        for claim in chosen:
            if not claim.needs:
                progress.step(claim.says)
            verdicts.append(Verdict(claim, claim.judge(trials), trials.runs(claim.needs)))
    return Verdicts(verdicts)


class _Line:
    """Progress in a notebook: one line that is updated, and cleared at the end."""

    def __enter__(self) -> _Line:
        from IPython.display import display

        self._shown: DisplayHandle = display({"text/plain": ""}, raw=True, display_id=True)
        return self

    def __exit__(self, *error: object) -> None:
        self.step("")

    def step(self, text: str) -> None:
        """Shows the current step."""
        self._shown.update({"text/plain": text}, raw=True)


def _claim(name: str) -> Claim:
    check_type("the name of a claim", name, str, f"a string such as {next(iter(CLAIMS))!r}")
    if name not in CLAIMS:
        near = difflib.get_close_matches(name, CLAIMS, n=1)
        suggestion = f" (did you mean {near[0]}?)" if near else ""
        raise LookupError(f"unknown claim {shown(name)}{suggestion}; it must be one of {', '.join(CLAIMS)}")
    return CLAIMS[name]
