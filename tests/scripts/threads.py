"""Training in threads: two after each other, then one beside which another trains."""

import threading

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(batch_size, steps, before=lambda: None, after=lambda: None):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(steps * batch_size, 8), torch.randint(0, 3, (steps * batch_size,)))
    for x, y in DataLoader(data, batch_size=batch_size):
        before()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"{threading.current_thread().name} {loss.item()!r}", flush=True)
        after()


def run(*threads):
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    run(threading.Thread(target=train, args=(4, 3), name="first"))
    run(threading.Thread(target=train, args=(6, 3), name="second"))
    began, ended = threading.Event(), threading.Event()
    third = threading.Thread(
        target=train, args=(8, 2), kwargs={"after": lambda: (began.set(), ended.wait())}, name="third"
    )
    beside = threading.Thread(target=train, args=(5, 3), kwargs={"before": began.wait}, name="beside")

    def wait_for_beside():
        beside.join()
        ended.set()

    run(third, beside, threading.Thread(target=wait_for_beside))
