"""Distributed data parallelism: all-reduce after backward, then during backward, then in buckets."""

from contextlib import contextmanager

import torch
import torch.distributed as dist


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


class Overlapped:
    def __init__(self, model):
        self.model, self.works = model, []
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)
            parameter.register_post_accumulate_grad_hook(self.start)

    def start(self, parameter):
        self.works.append(dist.all_reduce(parameter.grad, async_op=True))

    def finish(self):
        for work in self.works:
            work.wait()
        self.works.clear()
        for parameter in self.model.parameters():
            parameter.grad /= dist.get_world_size()


class Bucketed:
    def __init__(self, model, bucket_bytes):
        self.syncs, self.sent = True, []
        self.buckets, self.bucket_of = [[]], {}
        for parameter in reversed(list(model.parameters())):  # backward computes the last layer first
            dist.broadcast(parameter.data, src=0)
            if self.buckets[-1] and sum(p.nbytes for p in self.buckets[-1]) + parameter.nbytes > bucket_bytes:
                self.buckets.append([])
            self.buckets[-1].append(parameter)
            self.bucket_of[parameter] = len(self.buckets) - 1
            parameter.register_post_accumulate_grad_hook(self.ready)
        self.missing = [len(bucket) for bucket in self.buckets]

    def ready(self, parameter):
        number = self.bucket_of[parameter]
        self.missing[number] -= self.syncs
        if self.syncs and self.missing[number] == 0:
            flat = torch.cat([each.grad.flatten() for each in self.buckets[number]])
            self.sent.append((number, flat, dist.all_reduce(flat, async_op=True)))

    def finish(self):
        for number, flat, work in self.sent:
            work.wait()
            bucket = self.buckets[number]
            for parameter, mean in zip(bucket, (flat / dist.get_world_size()).split([p.numel() for p in bucket])):
                parameter.grad.copy_(mean.view_as(parameter))
        self.sent.clear()
        self.missing = [len(bucket) for bucket in self.buckets]

    @contextmanager
    def no_sync(self):
        self.syncs = False
        yield
        self.syncs = True
