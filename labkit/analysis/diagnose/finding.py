"""The Finding itself, and the fixes for the script that ran."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from labkit.record.documents import FindingFigures

if TYPE_CHECKING:
    from labkit.record.state import RunState


DDP = "DistributedDataParallel"  # the class name, as the probe records it


@dataclass(frozen=True)
class Finding:
    """One finding.

    `kind` is "wrong" (the run failed or trains incorrectly), "slow", "memory", or "unseen" (part of the run was not
    recorded). `title` says what happened, to which rank and where; `evidence` gives the figures or messages that show
    it; `cause` says why it happened, and `fix` what to change. `ranks` are the ranks concerned.
    """

    name: str
    title: str
    evidence: str
    cause: str
    fix: str
    kind: str = "wrong"
    ranks: tuple[int, ...] = ()

    def recorded(self) -> FindingFigures:
        """The finding as the summary has it."""
        return FindingFigures(**asdict(self) | {"ranks": list(self.ranks)})


def shorter(text: str, most: int = 300) -> str:
    """A text on one line, cut to at most `most` characters."""
    line = " ".join(text[: 4 * most].split())
    return line if len(line) <= most else line[: most - 3] + "…"


# ---- fixes for the script that ran


@dataclass(frozen=True)
class _Advice:
    """One fix: `here` for a strategy of the lab, `elsewhere` for any other script.

    `option` is the strategy's option that `here` sets; None if `here` sets none.
    """

    option: str | None
    here: str
    elsewhere: str


_ADVICE = {
    "larger batch": _Advice(None, "use a larger --batch-size", "use a larger batch per rank"),
    "smaller batch": _Advice(None, "use a smaller --batch-size", "use a smaller batch per rank"),
    "fewer ranks": _Advice(None, "use fewer ranks (--nproc)", "use fewer ranks (--nproc-per-node)"),
    "accumulate": _Advice(
        "accumulate",
        "set --option accumulate=4 to synchronize gradients once every four micro-batches",
        "accumulate gradients over several micro-batches and synchronize them only in the last one: `with "
        "model.no_sync():` around the others (DDP, FSDP1), or model.set_requires_gradient_sync(False) (FSDP2)",
    ),
    "accumulate for memory": _Advice(
        "accumulate",
        "set --option accumulate=2, which computes the same step in two micro-batches",
        "split each batch into micro-batches and accumulate their gradients: the same step with fewer activations at "
        "a time",
    ),
    "compress": _Advice(
        "compression",
        "set --option compression=fp16, which halves the bytes sent",
        "send gradients in 16 bits: model.register_comm_hook(None, "
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook) (DDP)",
    ),
    "larger buckets": _Advice(
        "bucket_mb",
        "set a larger --option bucket_mb, or leave it out (default: 1 MiB for the first bucket, 25 MiB for the others)",
        "set a larger DistributedDataParallel(model, bucket_cap_mb=…), or leave it out (default: 25)",
    ),
    "workers": _Advice(
        "workers",
        "set --option workers=2, which prefetches batches in other processes",
        "set DataLoader(num_workers=2, persistent_workers=True), which prefetches batches in other processes",
    ),
    "whole batches": _Advice(
        "fetch",
        "set --option fetch=batches, which indexes a whole batch at once",
        "index a whole batch at once instead of collating single samples",
    ),
    "checkpoint activations": _Advice(
        "checkpoint_activations",
        "set --option checkpoint_activations=true",
        "recompute activations in backward: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
    ),
    "sequence parallel": _Advice(
        "sequence_parallel",
        "set --option sequence_parallel=true",
        "with tensor parallelism, shard norms and dropout with SequenceParallel()",
    ),
    "clip": _Advice(
        "clip_norm",
        "clip the gradients with --option clip_norm=1",
        "clip the gradients with torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    ),
    "balance experts": _Advice(
        "balance",
        "set a larger --option balance, the weight of the loss that balances the experts",
        "add a loss that balances the experts, or increase its weight",
    ),
    "more slots": _Advice(
        "capacity_factor",
        "set a larger --option capacity_factor, so that fewer tokens are dropped",
        "give each expert more slots (a larger capacity factor), so that fewer tokens are dropped",
    ),
    "join": _Advice("join", "set --option join=true", "train inside `with model.join():` (DDP)"),
    "shard": _Advice(
        None,
        "use the strategy fsdp2 on more ranks",
        "shard parameters, gradients and optimizer state over more ranks (torch.distributed.fsdp.fully_shard)",
    ),
}


def advice(state: RunState, *names: str) -> list[str]:
    """The fixes of these names that apply to the script that ran; an option that its strategy does not have is left
    out."""
    spec = state.asked
    if spec is None:
        return [_ADVICE[name].elsewhere for name in names]
    return [
        _ADVICE[name].here for name in names if _ADVICE[name].option is None or _ADVICE[name].option in spec.options
    ]


def one_of(state: RunState, *names: str) -> str:
    """The same fixes as one sentence: `use a larger --batch-size; or …; or …`."""
    return "; or ".join(advice(state, *names))
