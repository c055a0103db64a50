"""What to change, in the terms of the script that ran: an option of labkit if a strategy ran, a line of PyTorch otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.record.state import RunState


@dataclass(frozen=True)
class _Advice:
    """One change. `option` is the strategy's option that `here` sets; None if `here` needs no option, or is no option."""

    option: str | None
    here: str
    elsewhere: str


_ADVICE = {
    "larger batch": _Advice(None, "use a larger --batch-size", "use a larger batch per rank"),
    "smaller batch": _Advice(None, "use a smaller --batch-size", "use a smaller batch per rank"),
    "fewer ranks": _Advice(None, "use fewer ranks (--nproc)", "use fewer ranks (--nproc-per-node)"),
    "accumulate": _Advice(
        "accumulate",
        "use --option accumulate=4, which exchanges gradients once for four batches",
        "accumulate gradients over several batches, and exchange them with the last one only: `with model.no_sync():` around the "
        "others (DDP, FSDP1), or model.set_requires_gradient_sync(False) (FSDP2)",
    ),
    "accumulate for memory": _Advice(
        "accumulate",
        "use --option accumulate=2, which takes the same step in two parts",
        "split each batch in parts and accumulate their gradients: the same step with fewer activations at a time",
    ),
    "compress": _Advice(
        "compression",
        "use --option compression=fp16, which sends half the bytes",
        "send gradients as 16 bits: model.register_comm_hook(None, "
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook) (DDP)",
    ),
    "larger buckets": _Advice(
        "bucket_mb", "use a larger --option bucket_mb (default: 25)", "use DistributedDataParallel(model, bucket_cap_mb=25) or larger"
    ),
    "workers": _Advice(
        "workers",
        "use --option workers=2, which fetches batches ahead in other processes",
        "use DataLoader(num_workers=2, persistent_workers=True), which fetches batches ahead in other processes",
    ),
    "whole batches": _Advice(
        "fetch",
        "use --option fetch=batches, which takes a whole batch from the tensors at once",
        "index a whole batch at once instead of collating single samples",
    ),
    "checkpoint activations": _Advice(
        "checkpoint_activations",
        "use --option checkpoint_activations=true",
        "compute activations again in backward: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
    ),
    "sequence parallel": _Advice(
        "sequence_parallel",
        "use --option sequence_parallel=true",
        "under tensor parallelism, shard norms and dropout with SequenceParallel()",
    ),
    "clip": _Advice(
        "clip_norm",
        "clip the gradients with --option clip_norm=1",
        "clip the gradients with torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    ),
    "join": _Advice("join", "use --option join=true", "train inside `with model.join():` (DDP)"),
    "shard": _Advice(
        None,
        "use the strategy fsdp2 on more ranks",
        "shard parameters, gradients and optimizer state over more ranks (torch.distributed.fsdp.fully_shard)",
    ),
}


def advice(state: RunState, *names: str) -> list[str]:
    """The changes of these names that the script can make; those whose option its strategy does not have are left out."""
    spec = state.asked
    if spec is None:
        return [_ADVICE[name].elsewhere for name in names]
    return [_ADVICE[name].here for name in names if _ADVICE[name].option is None or _ADVICE[name].option in spec.options]


def one_of(state: RunState, *names: str) -> str:
    """The same in one sentence: `use a larger --batch-size; or …; or …`."""
    return "; or ".join(advice(state, *names))
