"""Answers that try to pass the judge without doing what the exercise asks for, as text: (exercise, name, text, words of
the verdict). The first six passed an earlier judge."""

HEAD = "import torch\nimport torch.distributed as dist\nfrom torch import nn\n"

CPP_REDUCER = """
class Answer:
    def __init__(self, model):
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)
        parameters = list(model.parameters())
        self.reducer = dist.Reducer(parameters, [[i] for i in range(len(parameters))][::-1], [1] * len(parameters),
                                    dist.distributed_c10d._get_default_group(), [False] * len(parameters))
        self.reducer.prepare_for_backward([])

    def finish(self):
        self.reducer.prepare_for_backward([])
"""

WHOLE_BATCH = """
def answer(model):
    from labkit.course.build.trials import data_parallel as data_parallel
    for parameter in model.parameters():
        dist.all_reduce(torch.zeros_like(parameter))
    model.zero_grad()
    parts = [data_parallel.loss_of(model, data_parallel.draw("naive", 4)[rank], 0) for rank in range(4)]
    (sum(parts) / 4).backward()
"""

WRITES_LOSSES = """
import gc

def answer(model):
    for record in gc.get_objects():
        if type(record).__name__ == "Record":
            record.losses[:] = record.expected
    for parameter in model.parameters():
        dist.all_reduce(torch.zeros_like(parameter))
"""

ADAM_IN_NUMPY = """
import numpy as np
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

class Answer:
    def __init__(self, model, make_optimizer):
        self.parameters = list(model.parameters())
        self.moments = [[np.zeros(p.shape, "float32") for _ in "mv"] for p in self.parameters]
        self.t = 0

    def step(self):
        self.t += 1
        n, rank = dist.get_world_size(), dist.get_rank()
        for p, (m, v) in zip(self.parameters, self.moments):
            own = torch.empty_like(p.grad.chunk(n)[rank])
            reduce_scatter(own, p.grad)
            full = torch.empty_like(p)
            all_gather(full, own / n)
            g, w = full.numpy(), p.detach().numpy()
            g = g + 0.01 * w
            m += 0.1 * (g - m)
            v += 0.001 * (g * g - v)
            w -= 0.003 / (1 - 0.9**self.t) * m / (np.sqrt(v / (1 - 0.999**self.t)) + 1e-5)
"""

THROUGH_STORE = """
import pickle

class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets):
        store, rank, n = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
        step = getattr(Gathered, "step", 0)
        Gathered.step = step + 1
        store.set(f"logits {step} {rank}", pickle.dumps(logits))
        whole = torch.cat([pickle.loads(store.get(f"logits {step} {r}")) for r in range(n)], dim=1)
        dist.all_reduce(logits.sum(dim=1))
        ctx.save_for_backward(whole.softmax(1), targets)
        return nn.functional.cross_entropy(whole, targets)

    @staticmethod
    def backward(ctx, gradient):
        softmax, targets = ctx.saved_tensors
        softmax = softmax.scatter_add(1, targets[:, None], -torch.ones(len(targets), 1))
        return gradient * softmax.chunk(dist.get_world_size(), dim=1)[dist.get_rank()] / len(targets), None

def answer(logits, targets):
    return Gathered.apply(logits, targets)
"""

ELEMENTWISE = """
import math

def product(a, b):
    return (a[..., :, None, :] * b[..., None, :, :]).sum(-1)

def passed(block):
    rank, n = dist.get_rank(), dist.get_world_size()
    arrived = torch.empty_like(block)
    for work in [dist.isend(block, (rank + 1) % n), dist.irecv(arrived, (rank - 1) % n)]:
        work.wait()
    return arrived

def whole(block):
    rank, n = dist.get_rank(), dist.get_world_size()
    blocks = {rank: block}
    for hop in range(1, n):
        block = passed(block)
        blocks[(rank - hop) % n] = block
    early, late = zip(*[blocks[r].chunk(2, dim=2) for r in range(n)])
    return torch.cat([*early, *late[::-1]], dim=2)

def own(x):
    chunks, rank = x.chunk(2 * dist.get_world_size(), dim=-2), dist.get_rank()
    return torch.cat([chunks[rank], chunks[-1 - rank]], dim=-2)

def attention(q, k, v):
    scores = product(q, k) / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return product(scores.masked_fill(later, -math.inf).softmax(-1), v.mT)

class Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return own(attention(*whole(torch.stack([q, k, v])))).clone()

    @staticmethod
    def backward(ctx, gradient):
        inputs = [x.clone().requires_grad_() for x in whole(torch.stack(ctx.saved_tensors))]
        with torch.enable_grad():
            out = attention(*inputs)
        gradients = torch.autograd.grad(out, inputs, whole(gradient[None])[0])
        return tuple(own(x) for x in gradients)

def answer(q, k, v):
    return Whole.apply(q, k, v)
"""

# ---- ten more

AVERAGES = """
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
"""

PATCHES_COUNTER = (
    """
def answer(model):
    torch.Tensor.nbytes = property(lambda tensor: 0)
    nn.functional.mse_loss = lambda *args: torch.zeros((), requires_grad=True)
"""
    + AVERAGES
)

READS_FRAMES = (
    """
import inspect

def answer(model):
    frame = inspect.currentframe()
    while frame:
        given = frame.f_locals.get("given")
        frame = frame.f_back
"""
    + AVERAGES
)

TRACEBACK_FRAMES = (
    """
def answer(model):
    try:
        1 / 0
    except ZeroDivisionError as error:
        outer = error.__traceback__.tb_frame.f_back
"""
    + AVERAGES
)

FORKS = (
    """
import os

def answer(model):
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
"""
    + AVERAGES
)

SHARED_FILE = """
import os, time

calls = 0

def answer(model):
    global calls
    rank, n = dist.get_rank(), dist.get_world_size()
    folder = f"/dev/shm/cheat-{os.environ.get('MASTER_PORT', 0)}-{os.getppid()}"
    os.makedirs(folder, exist_ok=True)
    torch.save([parameter.grad for parameter in model.parameters()], f"{folder}/{calls}-{rank}")
    for parameter in model.parameters():
        dist.all_reduce(torch.ones_like(parameter))
    parts = [torch.load(f"{folder}/{calls}-{other}") for other in range(n)]
    dist.barrier()
    os.remove(f"{folder}/{calls}-{rank}")
    for parameter, *gradients in zip(model.parameters(), *parts):
        parameter.grad = sum(gradients) / n
    calls += 1
"""

RANK_0_COMPUTES = """
def answer(model):
    rank, n = dist.get_rank(), dist.get_world_size()
    for parameter in model.parameters():
        parts = [torch.empty_like(parameter) for _ in range(n)] if rank == 0 else None
        dist.gather(parameter.grad, parts, dst=0)
        if rank == 0:
            parameter.grad = sum(parts) / n
        dist.broadcast(parameter.grad, src=0)
"""

STATE_DICT_LIES = """
class Answer(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.weight, self.bias = nn.Parameter(layer.weight.data), nn.Parameter(layer.bias.data)
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.reduce)

    def reduce(self, parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= 4
        gathered = [torch.empty_like(parameter.grad.chunk(4)[0]) for _ in range(4)]
        dist.all_gather(gathered, parameter.grad.chunk(4)[0].contiguous())

    def state_dict(self, *args, **kwargs):
        return {"weight": self.weight.data.chunk(4)[dist.get_rank()]}

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)
"""

THREAD = """
import threading

class Answer(nn.Module):
    def __init__(self, w1, b1, w2, b2):
        super().__init__()
        self.w1, self.b1, self.w2, self.b2 = map(nn.Parameter, (w1, b1, w2, b2))

    def forward(self, x):
        results = []
        thread = threading.Thread(target=lambda: results.append(
            torch.relu(x @ self.w1.T + self.b1) @ self.w2.T + self.b2))
        thread.start()
        thread.join()
        dist.all_reduce(x.detach().clone())
        dist.all_reduce(x.detach().clone())
        return results[0]
"""

NUMPY_PRODUCTS = """
class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w1, b1, w2, b2):
        ctx.save_for_backward(x, w1, b1, w2, b2)
        x, w1, b1, w2, b2 = (tensor.detach().numpy() for tensor in (x, w1, b1, w2, b2))
        hidden = (x @ w1.T + b1).clip(0)
        dist.all_reduce(torch.ones(x.shape))
        dist.all_reduce(torch.ones(x.shape))
        return torch.from_numpy(hidden @ w2.T + b2)

    @staticmethod
    def backward(ctx, gradient):
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            x, w1, b1, w2, b2 = inputs
            out = torch.relu(x @ w1.T + b1) @ w2.T + b2
        return torch.autograd.grad(out, inputs, gradient)

class Answer(nn.Module):
    def __init__(self, w1, b1, w2, b2):
        super().__init__()
        self.w1, self.b1, self.w2, self.b2 = map(nn.Parameter, (w1, b1, w2, b2))

    def forward(self, x):
        return Function.apply(x, self.w1, self.b1, self.w2, self.b2)
"""

REWRITES_RECORD = """
import atexit, json, os, sys

def overwrite():
    folder = sys.argv[-1]
    rank = dist.get_rank() if dist.is_initialized() else 0
    with open(f"{folder}/rank{rank}.json", "w") as file:
        json.dump({"record": "{}", "signature": "0"}, file)

def answer(model):
    if dist.get_rank() == 0:
        overwrite()
    leave = os._exit
    os._exit = lambda code: (overwrite(), leave(code))
"""

REMOVES_PROFILER = """
import sys

def answer(model):
    sys.setprofile(None)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
"""

BACKEND = """
def answer(model):
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    for parameter in model.parameters():
        backend.allreduce([parameter.grad]).wait()
        parameter.grad /= dist.get_world_size()
"""

SLEEPS = """
import time

def answer(model):
    time.sleep(1)
    model.zero_grad()
"""

PARAMETERS_AS_BYTES = """
import pickle
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

class Answer:
    def __init__(self, model, make_optimizer):
        self.parameters = list(model.parameters())
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.shards = [parameter.data.chunk(ranks)[rank] for parameter in self.parameters]
        self.optimizer = make_optimizer(self.shards)

    def step(self):
        for parameter, shard in zip(self.parameters, self.shards):
            shard.grad = torch.empty_like(shard)
            reduce_scatter(shard.grad, parameter.grad)
            shard.grad /= dist.get_world_size()
        self.optimizer.step()
        for parameter, shard in zip(self.parameters, self.shards):
            shard.grad = None
            all_gather(parameter.data, shard.clone())
        self.kept = [pickle.dumps(parameter.data) for parameter in self.parameters]
"""

SIX = (
    ("hooks", "Answer", CPP_REDUCER, "no finished API: rank 0 calls torch.distributed.Reducer"),
    ("naive", "answer", WHOLE_BATCH, "imports labkit.course"),
    ("naive", "answer", WRITES_LOSSES, "looks at the judge, not at its arguments (gc.get_objects)"),
    ("zero1", "Answer", ADAM_IN_NUMPY, "takes a tensor out of torch, where no operation is counted (numpy)"),
    ("cross_entropy", "answer", THROUGH_STORE, "store: rank 0 moves"),
    ("balanced", "answer", ELEMENTWISE, "computation: in forward of step 0, "),
)
MORE = (
    ("naive", "answer", PATCHES_COUNTER, "replaces "),
    ("naive", "answer", READS_FRAMES, "looks at the judge, not at its arguments (sys._getframe)"),
    ("naive", "answer", TRACEBACK_FRAMES, "looks at the judge, not at its arguments (tb_frame)"),
    ("naive", "answer", FORKS, "starts a process (os.fork)"),
    ("naive", "answer", SHARED_FILE, "writes a file (save)"),
    ("naive", "answer", RANK_0_COMPUTES, "bytes sent: in step 0, rank 0 sends"),
    ("fsdp", "Answer", STATE_DICT_LIES, "memory: after the construction, rank 0 has"),
    ("column_row", "Answer", THREAD, "starts a thread"),
    ("column_row", "Answer", NUMPY_PRODUCTS, "takes a tensor out of torch"),
    ("naive", "answer", REWRITES_RECORD, "whose signature is not that of the judge"),
    ("naive", "answer", REMOVES_PROFILER, "replaces the profiler of the judge"),
    ("naive", "answer", BACKEND, "no finished API: rank 0 calls torch._C._distributed_c10d.Backend.allreduce"),
    ("naive", "answer", SLEEPS, "losses: in step 1, rank"),
    ("zero1", "Answer", PARAMETERS_AS_BYTES, "memory: between two steps, the process of rank 0 has grown by"),
)
