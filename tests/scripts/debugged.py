"""Ranks with a worker server of torch's debug server each, on loopback: rank 1 never calls the second all-reduce.

The port of each is in a file of the folder that the first argument names.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.debug._handlers  # registers the handlers that are written in Python
from torch._C._distributed_c10d import _WorkerServer

dist.init_process_group("gloo")
server = _WorkerServer("127.0.0.1", 0)
tensor = torch.ones(4)
dist.all_reduce(tensor)
port = Path(sys.argv[1]) / f"{dist.get_rank()}.port"
port.with_suffix(".tmp").write_text(str(server.port))
port.with_suffix(".tmp").rename(port)
if dist.get_rank() == 1:
    time.sleep(600)
dist.all_reduce(tensor)
