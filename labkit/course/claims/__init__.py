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

__all__ = ["CLAIMS", "on_trial"]

CLAIMS: dict[str, Claim] = {
    claim.name: claim
    for claim in (
        Claim(
            "cnn-parameters",
            "The MNIST CNN with three convolutions has 120K parameters",
            "computed",
            computed.cnn_parameters,
        ),
        Claim(
            "batch", "With a batch size of 128 on 2 GPUs, each GPU takes 64 samples", "computed", computed.batch_of_two
        ),
        Claim("fsdp-all-reduce", "FSDP synchronises gradients with an all-reduce", "computed", computed.fsdp_gradients),
        Claim("nccl-macos", "NCCL works on macOS", "asked", computed.nccl_on_macos),
        Claim("fsdp-memory", "FSDP halves memory on 2 GPUs", "measured", measured.fsdp_memory, ("ddp", "fsdp2")),
        Claim("two-gpus", "2 GPUs are 1.8 to 1.9 times as fast", "measured", measured.two_devices, ("single", "ddp")),
        Claim(
            "ddp-dp", "DDP is 20 to 50 % faster than DP on one machine", "measured", measured.ddp_over_dp, ("dp", "ddp")
        ),
        Claim(
            "dp-small",
            "DP is better for small models",
            "measured",
            measured.dp_for_small,
            ("dp of an mlp", "ddp of an mlp"),
        ),
        Claim(
            "fsdp-small", "FSDP costs 10 to 20 % on small models", "measured", measured.fsdp_for_small, ("ddp", "fsdp2")
        ),
        Claim(
            "pin-memory",
            "pin_memory with non_blocking gains 15 to 20 %",
            "measured",
            measured.pinned_memory,
            ("pinned", "pageable"),
        ),
        Claim(
            "scaling",
            "DDP scales by 1.9, 3.5 and 6 on 2, 4 and 8 GPUs",
            "measured",
            measured.ddp_scaling,
            ("single", "ddp", "ddp on 4", "ddp on 8"),
        ),
        Claim("65b", "65B parameters can be trained on 8 GPUs with 80 GB", "computed", computed.sixty_five_billion),
        Claim(
            "7b",
            "FSDP stores 7B parameters in 28 GB, and in 14 GB on each of two GPUs",
            "computed",
            computed.seven_billion,
        ),
        Claim(
            "1b-10b",
            "Models of 1B to 10B parameters cannot be trained on one GPU",
            "computed",
            computed.billions_on_one,
        ),
        Claim(
            "2-gb", "Training a CNN with 120K parameters takes 2 GB", "measured", computed.two_gigabytes, ("single",)
        ),
        Claim(
            "speedup-129",
            "2 GPUs train a small CNN 1.29 times as fast as one",
            "measured",
            measured.small_speedup,
            ("single", "ddp"),
        ),
        Claim("ddp-overhead", "The overhead of DDP is 5 to 10 %", "measured", measured.ddp_overhead, ("single", "ddp")),
        Claim(
            "overhead",
            "n GPUs are n / (1 + overhead) times as fast, with one overhead for all n",
            "computed",
            computed.one_overhead,
        ),
        Claim(
            "fsdp-scaling",
            "FSDP scales by 1.8, 3.7 and 7.5 on 2, 4 and 8 GPUs",
            "measured",
            measured.fsdp_scaling,
            ("single", "fsdp2", "fsdp2 on 4", "fsdp2 on 8"),
        ),
        Claim("fsdp-16", "From 16 GPUs on, FSDP is faster than DDP", "published", computed.fsdp_from_16),
        Claim(
            "tp-node",
            "Tensor parallelism should stay within a node",
            "published",
            computed.tensor_in_node,
        ),
        Claim(
            "micro-batch",
            "Prefer the largest micro-batch that fits",
            "published",
            computed.largest_micro_batch,
        ),
        Claim(
            "pipeline-4x",
            "A pipeline needs four times as many micro-batches as stages",
            "published",
            computed.four_per_stage,
        ),
        Claim("fsdp-8", "From 8 GPUs on, prefer FSDP to DDP", "modelled", computed.fsdp_from_8),
        Claim(
            "tp-batch",
            "Tensor parallelism within a node lowers the batch from which FSDP is no longer communication-bound",
            "modelled",
            computed.tensor_parallel_batch,
        ),
        Claim(
            "dtensor-all-to-all",
            "Redistributing a DTensor from one dimension to another is an all-to-all",
            "asked",
            computed.to_other_dimension,
        ),
        Claim("cpu-average", "DDP averages gradients on the CPU", "asked", computed.gradients_on_cpu),
        Claim(
            "dp-copies",
            "DataParallel copies the model between CPU and GPUs in every step",
            "documented",
            computed.dp_copies,
        ),
        Claim(
            "devices",
            "One DDP process can use several GPUs with device_ids=[0, 1]",
            "asked",
            computed.devices_per_process,
        ),
        Claim("colab", "Colab has neither NCCL nor torchrun", "documented", computed.colab),
        Claim(
            "rank-0-accuracy",
            "The training accuracy that rank 0 prints is that of the job",
            "computed",
            computed.accuracy_of_rank_0,
        ),
        Claim(
            "sum",
            "Summing gradients instead of averaging them scales the update with the number of GPUs",
            "asked",
            computed.summed_gradients,
        ),
        Claim(
            "wrap-1m", "FSDP with min_num_params=1M shards the MNIST CNN layer by layer", "asked", computed.wrap_by_size
        ),
        Claim(
            "set-device",
            "torch.cuda.set_device is not needed if DDP gets device_ids",
            "documented",
            computed.set_device,
        ),
        Claim(
            "rank-0-download",
            "Rank 0 downloads the data, the others wait in a barrier, and then all can read them",
            "argued",
            computed.rank_0_downloads,
        ),
        Claim(
            "optimizer-order",
            "The optimizer must be created after the model is wrapped",
            "asked",
            computed.optimizer_after_wrapping,
        ),
        Claim(
            "evaluate-module",
            "Evaluate with model.module, not with the DDP wrapper",
            "asked",
            computed.evaluation_without_wrapper,
        ),
    )
}


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
