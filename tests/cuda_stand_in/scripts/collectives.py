"""Every kind of NCCL collective between the ranks, whose results each rank writes to a file."""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")  # newer names of some collectives
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
seen = {}


def on_gpu(*numbers):
    """Numbers on the device: by a copy, because kernels compute nothing."""
    return torch.tensor([float(number) for number in numbers]).to(device)


reduced = on_gpu(*[rank + 1] * 4)
dist.all_reduce(reduced)
seen["all_reduce"] = reduced.tolist()
gathered = torch.empty(4 * ranks, device=device)
dist.all_gather_into_tensor(gathered, on_gpu(*[rank] * 4))
seen["all_gather"] = gathered.tolist()
scattered = torch.empty(2, device=device)
dist.reduce_scatter_tensor(scattered, on_gpu(*range(2 * ranks)))
seen["reduce_scatter"] = scattered.tolist()
sent = on_gpu(rank, rank)
dist.broadcast(sent, 1)
seen["broadcast"] = sent.tolist()
exchanged = torch.empty(ranks, device=device)
dist.all_to_all_single(exchanged, on_gpu(*(10 * rank + other for other in range(ranks))))
seen["all_to_all"] = exchanged.tolist()
received = torch.empty(3, device=device)
to_next = dist.P2POp(dist.isend, on_gpu(*[rank] * 3), (rank + 1) % ranks)
from_previous = dist.P2POp(dist.irecv, received, (rank - 1) % ranks)
for work in dist.batch_isend_irecv([to_next, from_previous]):
    work.wait()
seen["received"] = received.tolist()
seen["objects"] = [None] * ranks
dist.all_gather_object(seen["objects"], {"rank": rank})
dist.barrier()
torch.cuda.synchronize()
entries = json.loads(torch._C._distributed_c10d._dump_nccl_trace_json(includeCollectives=True, onlyActive=False))
seen["recorded"] = [entry["profiling_name"] for entry in entries["entries"]]
dist.destroy_process_group()
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(seen))
