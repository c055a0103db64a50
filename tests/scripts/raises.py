"""Two ranks; rank 1 finds a bad sample in step 2, while rank 0 waits for its gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        if index == 11 and dist.get_rank() == 1:
            try:
                {}["label"]
            except KeyError as error:
                raise ValueError("sample 11 has no label") from error
        return torch.randn(4)


dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(Samples(), batch_size=8):
    model(x).mean().backward()
    optimizer.step()
dist.destroy_process_group()
