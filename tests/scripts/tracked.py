"""The peak of a training script by torch's own memory tracker, in bytes: `python tracked.py train.py`."""

import sys

import torch
from torch.distributed._tools.mem_tracker import MemTracker

path = sys.argv[1]
script = {"__name__": "script", "__file__": path}
with open(path) as file:
    exec(compile(file.read(), path, "exec"), script)

device = torch.device("cpu")
torch.manual_seed(0)
train_data, _ = script["load_data"]()
model = script["parallelize"](script["build_blocks"](), device)
optimizer = script["build_optimizer"](model)
inputs, targets = (tensor[: script["BATCH_PER_RANK"]].clone() for tensor in train_data.tensors)
script["train_step"](model, optimizer, inputs, targets)  # creates the state of the optimizer
tracker = MemTracker()
tracker.track_external(model, optimizer, inputs, targets)
with tracker:
    script["train_step"](model, optimizer, inputs, targets)
print(tracker.get_tracker_snapshot("peak")[device]["Total"])
