"""A training on one rank that uses every part of the probe: every_part.py STYLE, one of ddp, fsdp and dtensor."""

import datetime
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
from torch.monitor import Event, log_event
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
STEPS = 10


def wrapped(model: torch.nn.Module, style: str) -> torch.nn.Module:
    if style == "ddp":
        return DistributedDataParallel(model)
    if style == "fsdp":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    return parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})


def main(style: str) -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        data = TensorDataset(torch.randn(2 * STEPS * 8, 8), torch.randint(0, 3, (2 * STEPS * 8,)))
        model = wrapped(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)), style)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        total = torch.zeros(())
        for number, (inputs, labels) in enumerate(DataLoader(data, batch_size=8), 1):
            scores = model(inputs)
            each = cross_entropy(scores, labels, reduction="none")  # two ways to a mean
            mean = each.mean() if number > STEPS else cross_entropy(scores, labels)
            loss = torch.tensor(0.5) * (mean / 1)
            loss.backward()
            total += loss.detach()
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
                print(total.item(), flush=True)
                log_event(Event("every", datetime.datetime.now(), {"true_loss": total.item()}))
                total.zero_()
        torch.save(model.state_dict(), f"{folder}/model.pt")
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
