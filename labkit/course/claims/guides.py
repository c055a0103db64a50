"""Claims of common guides about what torch does: tried in a process group of one rank, or documented. A documented
verdict names its source and says that it was not run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.course.claims.measured import FAILS, HOLDS, OPEN, PARTLY, Ruling, Trials
from labkit.plan.spec import Spec


def gradients_on_cpu(trials: Trials) -> Ruling:
    """Where the buckets are that DDP reduces."""

    def judge(seen: dict[str, Any]) -> Ruling:
        return Ruling(
            FAILS,
            f"Run here: the buckets of a model on the CPU are on the {seen['bucket_device'].upper()}, because DDP"
            " creates them on the device of the parameters. Documented, not run here: with the backend nccl, tensors on"
            " GPUs are reduced by kernels on the GPUs (documentation of torch.distributed, Backends).",
        )

    return _tried(trials, judge)


def devices_per_process(trials: Trials) -> Ruling:
    """What DDP does with two devices in one process."""

    def judge(seen: dict[str, Any]) -> Ruling:
        if not seen["two_devices"]:
            return Ruling(HOLDS, f"Run here: torch {seen['torch']} accepts DDP(model, device_ids=[0, 1]).")
        return Ruling(
            FAILS,
            f"Run here: DDP(model, device_ids=[0, 1]) raises “{seen['two_devices']}” One process drives one replica."
            " The replica itself may be split over several GPUs, with device_ids=None.",
        )

    return _tried(trials, judge)


def summed_gradients(trials: Trials) -> Ruling:
    """The first update with a gradient that is twice as large, as the sum over two ranks is."""

    def judge(seen: dict[str, Any]) -> Ruling:
        ratios = seen["update_ratios"]
        scaled = [round(ratio, 2) == 2 for ratio in ratios.values()]
        verdict = HOLDS if all(scaled) else PARTLY if any(scaled) else FAILS
        words = " and ".join(f"{ratio:.2f} times as large with {name}" for name, ratio in ratios.items())
        return Ruling(
            verdict,
            f"Run here: with the sum over 2 ranks instead of the mean, the first update is {words}. With SGD the sum"
            " multiplies the learning rate by the number of ranks; Adam divides the gradient by its own size. Raising"
            " the learning rate for a larger batch is a separate decision (Goyal et al. 2017 for SGD).",
            {name: (ratio,) for name, ratio in ratios.items()},
        )

    return _tried(trials, judge)


def wrap_by_size(trials: Trials) -> Ruling:
    """The units that the policy by size makes of the CNN."""

    def judge(seen: dict[str, Any]) -> Ruling:
        counts = {int(smallest): count for smallest, count in seen["units"].items()}
        words = ", ".join(f"{smallest:,} makes {count} unit{'s' * (count > 1)}" for smallest, count in counts.items())
        return Ruling(
            HOLDS if counts[1_000_000] > 1 else FAILS,
            f"Run here: min_num_params={words} of the CNN with 405,898 parameters. A single unit is gathered as a whole"
            " before forward: nothing overlaps, and the parameters take more memory than under DDP.",
            {f"units from {smallest:,}": (float(count),) for smallest, count in counts.items()},
        )

    return _tried(trials, judge)


def optimizer_after_wrapping(trials: Trials) -> Ruling:
    """Whether wrapping replaces the parameters that an optimizer would have."""

    def judge(seen: dict[str, Any]) -> Ruling:
        kept = seen["parameters_kept"]
        verdict = FAILS if all(kept.values()) else PARTLY if any(kept.values()) else HOLDS
        kept_words = "keeps the parameters, so the order does not matter"
        replaced = "replaces them, so an optimizer that was created before updates tensors that are no longer used"
        words = "; ".join(f"{name} {kept_words if same else replaced}" for name, same in kept.items())
        return Ruling(verdict, f"Run here: {words}.")

    return _tried(trials, judge)


def evaluation_without_wrapper(trials: Trials) -> Ruling:
    """Whether a forward pass through DDP communicates in evaluation."""

    def judge(seen: dict[str, Any]) -> Ruling:
        sends = seen["broadcasts_in_evaluation"]
        verdict = HOLDS if all(sends.values()) else PARTLY if any(sends.values()) else FAILS
        words = "; ".join(
            f"with {name}, a forward pass in evaluation {'broadcasts the buffers' if does else 'communicates nothing'}"
            for name, does in sends.items()
        )
        return Ruling(
            verdict,
            f"Run here: {words}. If all ranks evaluate, both forms give the same result. If only rank 0 does, the"
            " wrapper of a model with buffers waits for the other ranks, and model.module does not.",
        )

    return _tried(trials, judge)


def _tried(trials: Trials, judge: Callable[[dict[str, Any]], Ruling]) -> Ruling:
    seen, error = trials.behaviour()
    return Ruling(OPEN, f"torch could not be queried: {error}.") if error else judge(seen)


# ---- documented


def dp_copies(trials: Trials) -> Ruling:
    """What nn.DataParallel moves between CPU and GPU."""
    return Ruling(
        PARTLY,
        "Documented, not run here: only inputs that are on the CPU are copied from it, once, to the GPUs. Parameters,"
        " outputs and gradients go from GPU to GPU (torch/nn/parallel/comm.py, with NCCL or peer copies). A driver"
        " without peer access passes such copies through host memory. To decide how much: a profile on two GPUs.",
    )


def colab(trials: Trials) -> Ruling:
    """What the Linux wheel of torch contains."""
    return Ruling(
        FAILS,
        "Documented, not run here: Colab installs the CUDA wheel of torch for Linux, which contains NCCL and torchrun"
        " (documentation of torch.distributed, Backends; entry points of the wheel). What Colab lacks is a second GPU:"
        " two ranks on one GPU fail with “Duplicate GPU detected”. Two CPU ranks with gloo work.",
    )


def set_device(trials: Trials) -> Ruling:
    """Whether a rank needs set_device or device_id."""
    return Ruling(
        OPEN,
        "Documented, not run here: device_ids of DDP places only the model's work. Without torch.cuda.set_device or"
        " init_process_group(device_id=…), barrier() and collectives of objects use the current device, which is GPU 0"
        " on every rank (documentation of torch.distributed, barrier). Deciding what happens then needs two GPUs: run"
        " both forms and look at the memory of GPU 0.",
    )


def rank_0_downloads(trials: Trials) -> Ruling:
    """Rank 0 downloads, and the other ranks wait in a barrier."""
    return Ruling(
        PARTLY,
        "By argument: on one machine, or with a shared file system, it works. On several machines with local"
        " disks, only the machine of rank 0 has the files: let local rank 0 of every machine download. The others wait"
        " in a collective, so a download that takes longer than its timeout (10 minutes with NCCL, 30 with gloo) ends"
        " the job.",
    )


def accuracy_of_rank_0(trials: Trials) -> Ruling:
    """How many samples the accuracy of one rank is computed from."""
    spec = Spec("ddp", nproc=8)
    own = spec.train_samples // spec.nproc
    return Ruling(
        FAILS,
        f"By the sampler: each of {spec.nproc} ranks trains on {own:,} of {spec.train_samples:,} samples per epoch, and"
        " rank 0 counts only its own. Sum the correct answers and the samples of all ranks with an all-reduce before"
        " you divide. (The mean of the ranks' accuracies is exact only if all have the same number of samples.)",
        {"samples of rank 0": (float(own),), "samples": (float(spec.train_samples),)},
    )
