"""Errors that the field knows, each raised by torch or a library itself on CPU ranks: one function per case, with the
name of its row in the table of known errors, or of one of several ways to it.

`known_errors.py FOLDER` calls the function that `FOLDER/case.json` names; each rank writes what it raised to
`FOLDER/rankN.json`.
"""

import json
import os
import resource
import sys
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CPU = torch.device("cpu")
DATA = TensorDataset(torch.ones(8, 4))
RANK = os.environ["RANK"]
SAVED = f"{sys.argv[1]}/saved{RANK}"  # a path of this rank's own


class Twice(nn.Module):
    """Uses one layer twice, with recomputation of the reentrant kind."""

    def __init__(self):
        super().__init__()
        self.enter, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.enter(x)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


class Skips(nn.Module):
    """Has a layer that it does not use."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def unused_parameters():
    model = DistributedDataParallel(Skips())
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()


def marked_twice():
    model = DistributedDataParallel(Twice())
    model(torch.ones(2, 4)).sum().backward()


def changed_in_place():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = model(torch.ones(2, 4)).sum(), model(torch.ones(2, 4)).sum()
    first.backward()
    optimizer.step()
    second.backward()


def nothing_to_train():
    DistributedDataParallel(nn.ReLU())


def parameters_differ():
    DistributedDataParallel(nn.Linear(4, 4 + dist.get_rank()))


def no_group():
    dist.destroy_process_group()
    dist.all_reduce(torch.ones(4))


def not_started_by_torchrun():
    dist.destroy_process_group()
    os.environ.pop("RANK")
    torch.distributed.distributed_c10d.init_process_group("gloo")


def group_twice():
    torch.distributed.distributed_c10d.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def group_too_large():
    dist.new_group([0, 1, 2])


def mesh_too_large():
    init_device_mesh("cpu", (8,))


def cpu_tensor():
    group = dist.new_group(backend="cuda:gloo")
    dist.all_reduce(torch.ones(4), group=group)


def no_interface():
    dist.destroy_process_group()
    os.environ["GLOO_SOCKET_IFNAME"] = "eth99"
    torch.distributed.distributed_c10d.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def peers_missing():
    dist.TCPStore("localhost", 0, 2, is_master=True, timeout=timedelta(seconds=1))


def no_connection():
    dist.TCPStore("localhost", 9, 2, is_master=False, timeout=timedelta(seconds=1))


def barrier_not_reached():
    if dist.get_rank() == 0:
        dist.monitored_barrier(timeout=timedelta(seconds=1))


def not_contiguous():
    dist.send(torch.ones(4, 8)[:, ::2], 1 - dist.get_rank())


def output_size():
    dist.all_gather_into_tensor(torch.ones(5), torch.ones(4))


def split_sizes():
    dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 2], [1, 2])


def mixed_tensors():
    weight = distribute_tensor(torch.ones(4, 4), mesh(), [Shard(0)])
    nn.functional.linear(torch.ones(4, 4), weight)


def whole_into_shards():
    state = nn.Linear(4, 4).state_dict()
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh())
    model.load_state_dict(state)


def batch_norm_on_cpu():
    DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(4))))


def no_folder_to_save():
    torch.save({}, f"{SAVED}/checkpoint.pt")


def mixed_update():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parallelize_module(model, mesh(), {"0": ColwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    optimizer.step()


def mixed_meshes():
    pair = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("a", "b"))
    one, other = (distribute_tensor(torch.ones(4), pair[axis], [Replicate()]) for axis in ("a", "b"))
    one + other


def no_sharding_rule():
    tensor = distribute_tensor(torch.ones(4, 4), mesh(), [Shard(0)])
    torch.cdist(tensor, tensor)


def still_on_meta():
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh())
    model(torch.ones(2, 4))


def flat_parameter():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
    model = FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True)
    model.module[0](torch.ones(2, dtype=torch.long))


def mixed_dtypes():
    FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16)), device_id=CPU)


def mixed_requires_grad():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    FullyShardedDataParallel(model, device_id=CPU)


def fsdp_on_cpu():
    FullyShardedDataParallel(nn.Linear(4, 4))


def stage_shapes():
    stage = PipelineStage(nn.Linear(4, 4), dist.get_rank(), dist.get_world_size(), CPU)
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda output, target: output.sum())
    for batch in (8, 6):
        inputs = torch.ones(batch, 4)
        if dist.get_rank() == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=inputs)


def stage_without_gradient():
    shapes = {"input_args": (torch.empty(4, 4),), "output_args": (torch.empty(4, 4),)}
    stage = PipelineStage(nn.Linear(4, 4), dist.get_rank(), dist.get_world_size(), CPU, **shapes)
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda output, target: output.sum())
    inputs = torch.ones(8, 4)
    if dist.get_rank() == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=inputs)


def odd_micro_batches():
    stage = PipelineStage(nn.Linear(4, 4), dist.get_rank(), dist.get_world_size(), CPU)
    schedule = ScheduleGPipe(stage, 4, loss_fn=lambda output, target: output.sum())
    inputs = torch.ones(3, 4)
    if dist.get_rank() == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=inputs)


def async_needs_cpu():
    dist.destroy_process_group()
    torch.distributed.distributed_c10d.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    dcp.async_save({"a": torch.ones(2)}, checkpoint_id=SAVED)


def key_not_saved():
    dcp.save({"a": torch.ones(2)}, checkpoint_id=SAVED, no_dist=True)
    dcp.load({"b": torch.ones(2)}, checkpoint_id=SAVED, no_dist=True)


def wrapped_names():
    nn.Linear(4, 4).load_state_dict(DistributedDataParallel(nn.Linear(4, 4)).state_dict())


def optimizer_group():
    saved = torch.optim.AdamW(nn.Linear(4, 4).parameters()).state_dict()
    torch.optim.AdamW(nn.Linear(4, 4, bias=False).parameters()).load_state_dict(saved)


def code_in_checkpoint():
    torch.save({"model": DATA}, SAVED)
    torch.load(SAVED)


def saved_on_gpu():
    torch.serialization.register_package(0, lambda storage: "cuda:0", lambda storage, location: None)
    torch.save(torch.ones(2), SAVED)
    torch.load(SAVED)


def no_cuda_in_build():
    torch.ones(2).cuda()


def no_gradient():
    nn.Linear(4, 4).requires_grad_(False)(torch.ones(2, 4)).sum().backward()


def graph_freed():
    loss = nn.Linear(4, 4)(torch.ones(2, 4)).pow(2).sum()
    loss.backward()
    loss.backward()


def one_sample():
    nn.BatchNorm1d(4)(torch.ones(1, 4))


def half_gradients():
    scaler, model = torch.amp.GradScaler("cpu"), nn.Linear(4, 4, dtype=torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.ones(2, 4, dtype=torch.float16)).sum()).backward()
    scaler.step(optimizer)


def unscaled_twice():
    scaler, model = torch.amp.GradScaler("cpu"), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def nothing_scaled():
    scaler, model = torch.amp.GradScaler("cpu"), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


def invalid_sampler_rank():
    DistributedSampler(DATA, num_replicas=2, rank=2)


def worker_died():
    class Dies(TensorDataset):
        def __getitem__(self, index):
            os._exit(1)

    list(DataLoader(Dies(torch.ones(8, 4)), num_workers=1))


def not_picklable():
    torch.multiprocessing.spawn(lambda rank: None, nprocs=1)


def shuffle_beside_sampler():
    DataLoader(DATA, sampler=DistributedSampler(DATA), shuffle=True)


def deepspeed_batch():
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    config = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    deepspeed.initialize(model=nn.Linear(4, 4), config=config)


def deepspeed_optimizer():
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = nn.Linear(4, 4)
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}
    deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)


def open_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    [tempfile.TemporaryFile() for _ in range(64)]  # noqa: SIM115


def devices_differ():
    torch.ones(2) + torch.ones(2, device="meta")


def no_nccl():
    dist.destroy_process_group()
    torch.distributed.distributed_c10d.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


def torchvision_build():
    torch.library.register_fake("torchvision::nms")(lambda *boxes: boxes[0])  # as torchvision does when it is imported


def accelerate_device_map():
    from accelerate import Accelerator

    model = nn.Linear(4, 4)
    model.hf_device_map = {"a": 0, "b": 1}
    Accelerator(cpu=True).prepare_model(model)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ |= {"LOCAL_RANK": RANK, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ["DS_ACCELERATOR"] = "cpu"
    dist.init_process_group("gloo")
    try:
        globals()[json.loads(Path(sys.argv[1], "case.json").read_text())]()
    except BaseException as error:
        said = {"type": type(error).__name__, "message": str(error)}
        Path(sys.argv[1], f"rank{RANK}.json").write_text(json.dumps(said))
        raise
