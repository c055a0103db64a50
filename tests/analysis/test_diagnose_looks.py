"""Trainings that end without an error and train something else: what two ranks recorded of them, and the findings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from diagnosed import script, status
from folded import events_in, fold
from places import SCRIPTS
from probed import environment

from labkit.analysis.diagnose import findings
from labkit.record.state import RunState

DRIFT, EXTRA = "replicas_differ", "extra_collective"
HEALTHY = (
    "healthy_ddp",
    "healthy_by_hand",
    "healthy_averaging",
    "healthy_averaging_each_step",
    "healthy_averaging_every_other_step",
    "healthy_averaging_every_fifth_step",
    "healthy_averaging_in_turns",
    "healthy_fsdp",
    "healthy_fsdp_after_an_evaluation",
    "healthy_fsdp_with_averaged_buffers",
    "healthy_global_mean",
    "healthy_data",
    "healthy_evaluation_by_accelerate",
    "healthy_noise",
    "healthy_thread",
    "healthy_part_of_each_rank",
    "healthy_two_losses",
    "healthy_averaging_in_steps",
    "healthy_averaging_of_a_vector",
    "healthy_averaging_of_the_state",
    "healthy_norm_that_is_logged",
    "healthy_clipped_average",
    "healthy_two_models",
    "healthy_latent",
    "healthy_accumulation",
    "healthy_experts",
    "healthy_norm_after_the_step",
    "healthy_micro_batches",
    "healthy_adversarial_samples",
    "healthy_micro_batches_that_are_collected",
    "healthy_schedule",
    "healthy_tie",
    "healthy_second_attempt",
)
# by case: the finding, and what it says
FOUND: dict[str, tuple[str, ...]] = {
    "loaded_after_wrapping": (DRIFT, "differ from the start", "after DistributedDataParallel(model)"),
    "drawn_after_wrapping": (DRIFT, "differ from the start", "after DistributedDataParallel(model)"),
    "wrapped_without_sending": (DRIFT, "differ from the start", "init_sync=False"),
    "loaded_by_one_rank": (DRIFT, "differ from the start", "dist.broadcast(tensor, 0)"),
    "drawn_with_the_seed_of_each_rank": (DRIFT, "differ from the start", "from its own seed"),
    "loaded_and_reduced_as_one": (DRIFT, "differ from the start", "dist.broadcast(tensor, 0)"),
    "zero_of_reversed_parameters": (DRIFT, "number 1 is 0.weight on rank 0, 2.bias on rank 1"),
    "zero_of_rotated_parameters": (DRIFT, "number 1 is 0.weight on rank 0, 2.weight on rank 1"),
    "zero_of_sorted_sizes": (DRIFT, "number 2 is 0.bias on rank 0, 2.weight on rank 1"),
    "synchronised_too_early": (DRIFT, "belongs to a forward in DDP's no_sync()"),
    "synchronised_every_fourth": (DRIFT, "belongs to a forward in DDP's no_sync()"),
    "synchronised_by_the_first_rank": (DRIFT, "belongs to a forward in DDP's no_sync()"),
    "synchronised_outside_of_forward": (DRIFT, "belongs to a forward in DDP's no_sync()"),
    "clipped_by_another_limit": (DRIFT, "in proportion 1 on rank 0, 2 on rank 1", "clipped by another limit"),
    "clipped_by_hand": (DRIFT, "in proportion 1 on rank 0, 2 on rank 1"),
    "divided_by_the_rank": (DRIFT, "in proportion 2 on rank 0, 1 on rank 1", "divided by another number"),
    "restored_by_the_first_rank": (
        DRIFT,
        "equal gradients and made different updates",
        "a checkpoint was loaded on one rank",
    ),
    "restored_by_the_second_rank": (
        DRIFT,
        "equal gradients and made different updates",
        "a checkpoint was loaded on one rank",
    ),
    "restored_and_reduced_by_hand": (
        DRIFT,
        "equal gradients and made different updates",
        "a checkpoint was loaded on one rank",
    ),
    "one_more_to_log": (EXTRA, "in a step between 7 and 8", "9 on rank 0, 8 on rank 1 after step 8"),
    "one_more_before_the_steps": (EXTRA, "rank 0 called", "before the first step", "1 on rank 0, 0 on rank 1"),
    "one_more_of_a_group": (EXTRA, "rank 1 called", "in step 4", "group #1"),
    "rate_of_a_scheduler": (DRIFT, "learning rate differs first: 0.05 on rank 0, 0.025 on rank 1", "5 and 6"),
    "decay_of_a_rank": (DRIFT, "weight_decay differs first: 0.1 on rank 0, 0.2 on rank 1", "from step 1 on"),
    "momentum_of_a_group": (DRIFT, "momentum of group 1 differs first", "0.bias, 2.bias differ"),
    "unfrozen_layer": (DRIFT, "none of its buckets", "sums of 0.weight, 0.bias differ", "5 and 6"),
    "unfrozen_bias": (DRIFT, "none of its buckets", "sums of 2.bias differ"),
    "layer_added_later": (DRIFT, "none of its buckets", "sums of 3.weight, 3.bias differ"),
    "forward_of_the_module": (DRIFT, "the forward goes around DDP"),
    "forward_of_a_name_for_it": (DRIFT, "the forward goes around DDP"),
    "forward_kept_from_before": (DRIFT, "the forward goes around DDP"),
    "buffers_of_batch_norm": (DRIFT, "only buffers", "1.running_mean"),
    "buffers_without_weights": (DRIFT, "only buffers", "1.running_var"),
    "buffers_of_ones_own": (DRIFT, "only buffers", "1.mean"),
    "buffers_beside_shards": (DRIFT, "only buffers", "1.running_mean", "not buffers"),
    "layer_beside_shards": (DRIFT, "some parameters", "sums of 2.weight, 2.bias differ", "ignored_params"),
    "shards_of_one_rank": (DRIFT, "the replicas", "a mesh of one rank"),
    "averaged_without_the_head": (
        DRIFT,
        "averages the other parameters",
        " 6, 8, ",
        "sums of 2.weight, 2.bias diff",
    ),
    "averaged_without_biases": (DRIFT, "averages the other parameters", " 6, 9, 12", "sums of 0.bias, 2.bias differ"),
    "averaged_one_tensor": (DRIFT, "averages the other parameters", "sums of 0.weight, 0.bias, 2.b"),
    "averaged_in_steps_without_biases": (DRIFT, "averages the other parameters", "sums of 0.bias, 2.bias differ"),
    "averaged_in_a_hook_without_the_head": (DRIFT, "averages the other parameters", "sums of 2.weight, 2.bias differ"),
    "averaged_in_every_third_step": (DRIFT, "averages the other parameters", " 6, 9, 12", "sums of 0.weight, 0.bias"),
    "averaged_vector_that_stays": (DRIFT, "what is averaged is a copy", "after steps "),
    "averaged_copy_of_the_state": (DRIFT, "what is averaged is a copy", "after steps "),
    "averaged_twin": (DRIFT, "what is averaged is a copy", "after steps "),
    "sent_by_the_first_rank": (DRIFT, "what rank 1 trained is replaced by the parameters of rank 0"),
    "sent_by_the_last_rank": (DRIFT, "what rank 0 trained is replaced by the parameters of rank 1"),
    "sent_as_one_vector": (DRIFT, "what rank 1 trained is replaced by the parameters of rank 0"),
    "buffers_beside_reduced_gradients": (DRIFT, "only buffers", "1.running_mean", "not buffers"),
    "buffers_of_ones_own_beside_reduced_gradients": (DRIFT, "only buffers", "1.mean", "not buffers"),
    "buffers_beside_averaged_parameters": (DRIFT, "only buffers", "1.running_mean", "not buffers"),
    "forward_around_the_head": (DRIFT, "the replicas of one model", "sums of layer.weight", "goes around DDP"),
    "method_of_the_head": (DRIFT, "the replicas of one model", "sums of layer.weight", "goes around DDP"),
    "forward_around_the_body": (DRIFT, "the replicas of one model", "sums of 0.weight, 0.bias", "goes around DDP"),
    "rate_halved_for_two_steps": (DRIFT, "learning rate summed over the steps differs first", "since a step between"),
    "rate_of_zero_for_a_step": (DRIFT, "learning rate summed over the steps differs first", "since a step between"),
    "rate_doubled_beside_reduced_gradients": (DRIFT, "learning rate summed over the steps differs first"),
    "reduced_flat_copy": (DRIFT, "it is a copy", "260 bytes"),
    "reduced_in_another_type": (DRIFT, "it is a copy", "520 bytes"),
    "reduced_clones": (DRIFT, "it is a copy", "260 bytes"),
    "tied_table": ("tied_apart", "0.weight on rank 0 and 0.weight on rank 1"),
    "tied_behind_a_layer": ("tied_apart", "0.weight on rank 0 and 1.weight on rank 1"),
    "tied_behind_a_norm": ("tied_apart", "0.weight on rank 0 and 1.weight on rank 1"),
    "tie_that_is_lost": ("tied_apart", "embedding.weight and head.weight were equal", "deepcopy"),
    "never_synchronised": ("nothing_sent", "without a synchronisation", "the replicas differ"),
    "inner_method": ("nothing_sent", "the forward goes around DistributedDataParallel", "2.bias differ"),
    "group_without_use": ("nothing_sent", "a process group, but nothing is sent"),
    "slurm_variable": ("separate_ranks", "no process group", "SLURM_NTASKS, which torchrun does not set"),
    "mpi_variable": ("separate_ranks", "no process group", "OMPI_COMM_WORLD_SIZE"),
    "groups_of_one": ("separate_ranks", "groups of one rank"),
    "optimizer_before_sharding": ("no_effect", "from before fully_shard", "in 14 steps"),
    "optimizer_of_a_copy": ("no_effect", "other tensors than the model"),
    "rate_of_zero": ("no_effect", "the learning rate is 0"),
    "optimizer_after_a_forward": ("no_effect", "after step 1", "before the first forward"),
    "optimizer_of_gathered_parameters": ("no_effect", "after step 1", "before the first forward"),
    "optimizer_after_a_summary": ("no_effect", "before the first forward"),
    "optimizer_of_a_gathered_layer": ("no_update", "2.bias, 2.weight get", "before the first forward"),
    "head_after_the_optimizer": ("no_update", "2.bias, 2.weight get", "a layer was replaced"),
    "embedding_after_the_optimizer": ("no_update", "0.bias, 0.weight get", "a layer was replaced"),
    "features_without_gradient": ("no_effect", "gradients of zero", "torch.distributed.nn.functional.all_gather"),
    "features_of_a_masked_rank": ("no_effect", "gradients of zero"),
    "features_multiplied_by_zero": ("no_effect", "gradients of zero"),
    "reset_by_the_optimizer": ("no_effect", "reset before step()", "zero_grad() before backward"),
    "reset_by_the_model": ("no_effect", "reset before step()"),
    "reset_to_zeros": ("no_effect", "reset before step()"),
    "scaler_that_skips": ("trains_elsewhere", "the GradScaler skipped every step", "GradScaler.step: 14"),
    "scaler_of_a_large_scale": ("trains_elsewhere", "the GradScaler skipped every step"),
    "unused_layer": ("no_gradient", "other.bias, other.weight never got a gradient"),
    "detached_layer": ("no_gradient", "other.bias, other.weight never got a gradient"),
    "layer_without_gradient": ("no_gradient", "other.bias, other.weight never got a gradient"),
    "same_dropout": ("same_random", "torch's generator"),
    "same_noise": ("same_random", "torch's generator"),
    "same_augmentation": ("same_random", "torch's generator"),
    "same_latent": ("same_random", "torch's generator"),
    "same_classes": ("same_random", "torch's generator"),
    "same_mixture": ("same_random", "torch's generator"),
    "shuffled_by_the_rank": ("unlike_order", "seed 0 on rank 0, seed 1 on rank 1"),
    "shuffled_by_the_time_of_each_rank": ("unlike_order", "shuffles by a different seed"),
    "epoch_of_the_rank": ("unlike_order", "epoch 0 on rank 0, epoch 3 on rank 1", "set_epoch"),
    "split_by_rank": ("unlike_data", "a random split", "64 samples"),
    "order_of_files": ("unlike_data", "in a different order", "sorted(names)"),
    "data_of_each_rank": ("unlike_data", "a TensorDataset that is not the same"),
    "evaluated_with_padding": ("evaluated_twice", "10 samples are evaluated of a data set of 9", "DistributedSampler"),
    "evaluated_in_parts": ("evaluated_twice", "10 samples are evaluated of a data set of 9", "overlap"),
    "evaluated_in_repeated_batches": ("evaluated_twice", "12 samples are evaluated of a data set of 10", "overlap"),
    "evaluated_with_repeated_batches_of_accelerate": (
        "evaluated_twice",
        "12 samples are evaluated of a data set of 9",
        "a BatchSamplerShard repeats samples",
    ),
    "evaluated_samples_of_training_gathered_once": (
        "evaluated_twice",
        "14 of 16 evaluated samples are also trained on",
    ),
    "evaluated_samples_of_training": ("evaluated_twice", "14 of 16 evaluated samples are also trained on"),
    "mean_of_tokens": ("unequal_weights", "a mean over 7 on rank 0, 3 on rank 1"),
    "mean_of_a_mask": ("unequal_weights", "a mean over 7 on rank 0, 3 on rank 1"),
    "mean_of_unequal_batches": ("unequal_weights", "a mean over 8 on rank 0, 3 on rank 1"),
    "mean_of_each_micro_batch": ("unequal_micro_batches", "means over 2 to 8 labels", "4 times as much"),
    "mean_of_each_micro_batch_in_parts": ("unequal_micro_batches", "means over 2 to 8 labels"),
    "mean_of_each_micro_batch_and_a_penalty": ("unequal_micro_batches", "means over 2 to 8 labels"),
    "gradients_never_reset": ("gradients_kept", "nothing reset the gradients"),
    "evaluated_and_never_trained_again": ("stays_in_evaluation", "between 5 and 6", "model.training was True"),
    "clipped_before_unscaling": ("clipped_scaled", "before they are unscaled"),
    "clipped_before_the_average": ("clipped_first", "multiplied gradients by"),
    "clipped_by_the_largest_before_the_average": ("clipped_first", "multiplied gradients by"),
    "clipped_before_one_vector_is_averaged": ("clipped_first", "multiplied gradients by"),
    "experts_taken_for_replicas": ("experts_replaced", "expert.weight, expert.bias of the other", "all-to-all"),
    "clipped_after_the_step": ("clipped_late", "between step() and the next backward"),
    "reset_before_each_micro_batch": ("dropped_micro_batches", "1 of 2 micro-batches"),
    "rate_of_an_epoch_in_each_step": ("schedule_over", "from step 8 on", "0.05 at most"),
    "loaded_with_a_prefix": ("nothing_loaded", "none of 4 tensors into Sequential", "module.0.bias"),
    "divided_by_two_samplers": ("divided_twice", "1 of 4 parts"),
    "norm_of_the_shards": ("local_norm", "all gradients were multiplied by"),
    "largest_of_the_shards": ("local_norm", "all gradients were multiplied by"),
    "norm_by_the_library": ("local_norm", "all gradients were multiplied by"),
}


SLOW = {  # by case: the parameters whose gradients nothing uses
    "adapter_after_the_optimizer": "0.down.bias, 0.down.weight, 0.up.bias, 0.up.weight",
    "adapter_beside_the_optimizer": "adapter.bias, adapter.weight",
    "optimizer_of_one_layer": "0.bias, 0.weight",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The run folders of all cases, by name."""
    root = tmp_path_factory.mktemp("something_else")
    argv = [sys.executable, str(SCRIPTS / "something_else.py"), str(root), *HEALTHY, *FOUND, *SLOW]
    subprocess.run(argv, env=environment(None), check=True, timeout=850)
    return root


def state_of(runs: Path, name: str) -> RunState:
    events = [events_in(runs / name / "events" / f"rank{rank}.jsonl") for rank in (0, 1)]
    assert [event for one in events for event in one if event["kind"] in ("probe_error", "error")] == []
    state = fold(script(), *events, status("finished"))
    assert state.broken == 0 and [state.exit_code(rank) for rank in (0, 1)] == [0, 0]
    return state


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_in_a_training_that_is_right(runs, name):
    state = state_of(runs, name)
    assert all(len(rank.looks) >= 4 for rank in state.ranks.values())
    assert [one.title for one in findings(state) if one.kind != "slow"] == []  # a busy machine may delay a rank


@pytest.mark.parametrize("name", FOUND)
def test_a_training_of_something_else_is_named(runs, name):
    kind, *words = FOUND[name]
    found = [one for one in findings(state_of(runs, name)) if one.kind != "slow"]
    assert {one.name for one in found} == {kind}, [one.title for one in found]
    told = " ".join((found[0].title, found[0].evidence, found[0].cause, found[0].fix))
    assert [word for word in words if word not in told] == [], told
    assert {rank for one in found for rank in one.ranks} == {0, 1}


@pytest.mark.parametrize("name", SLOW)
def test_gradients_that_no_optimizer_uses_are_named(runs, name):
    found = findings(state_of(runs, name))
    assert [one.name for one in found if one.kind != "slow"] == []
    assert [one.title for one in found if one.name == "no_update"] == [
        f"{SLOW[name]} get gradients, but no optimizer holds them"
    ]


def test_the_ranks_send_nothing_to_compare(runs):
    """What the ranks record adds no collective: those of a step are the script's own."""
    events = events_in(runs / "healthy_ddp" / "events" / "rank0.jsonl")
    assert [event["ops"]["all_reduce"]["calls"] for event in events if event["kind"] == "traffic"] == [1, 1]


def test_looks_become_rare(runs):
    """Except for a step at whose end a profile begins, the same steps on both ranks."""
    file = runs / "healthy_ddp" / "events" / "rank0.jsonl"
    looks = [event["step"] for event in events_in(file) if event["kind"] == "look" and not event.get("end")]
    assert set(looks) <= {0, 1, 2, 3, 4, 6, 8, 12} and len(looks) >= 6
    assert file.stat().st_size < 1 << 15
