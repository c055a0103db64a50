"""The 1F1B schedule of a pipeline, with any number of stages."""

from collections import deque

import torch
import torch.distributed as dist


def one_f_one_b(stage, count, shape, inputs, loss_of):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    waiting, sends = deque(), []

    def received(source):
        x = torch.empty(shape)
        dist.recv(x, source)
        return x

    def forward(number):
        x = inputs[number] if rank == 0 else received(rank - 1).requires_grad_()
        y = stage(x)
        if loss_of is not None:
            y = loss_of(y, number)
        else:
            sends.append(dist.isend(y.detach(), rank + 1))
        waiting.append((x, y))

    def backward():
        x, y = waiting.popleft()
        y.backward(None if loss_of is not None else received(rank + 1))
        if rank > 0:
            sends.append(dist.isend(x.grad, rank - 1))

    warm_up = min(ranks - rank - 1, count)
    for number in range(warm_up):
        forward(number)
    for number in range(warm_up, count):
        forward(number)
        backward()
    for _ in range(warm_up):
        backward()
    for send in sends:
        send.wait()
