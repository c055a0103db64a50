"""Short trainings of two ranks, most of which train something else than their author thinks, and end without an error.

something_else.py FOLDER [CASE …]: each case is a function below, run by two forked processes under the probe, whose run
folder is FOLDER/CASE. torch is imported once.
"""

import copy
import gc
import importlib
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    random_split,
)

STEPS = 14
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def group(ranks=RANKS, name="store"):
    store = Path(os.environ["LABKIT_RUN_DIR"]) / name
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=RANK % ranks, world_size=ranks)


def net(width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 1))


def batches(steps=STEPS, size=8):
    generator = torch.Generator().manual_seed(100 + RANK)
    for _ in range(steps):
        x = torch.randn(size, 6, generator=generator)
        yield x, x[:, :1]


def train(model, optimizer=None, forward=None, then=None, steps=STEPS, each=None):
    """Trains; `forward(x, y)` returns the loss, `then()` runs before the step, `each(step)` after it."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    for step, (x, y) in enumerate(batches(steps), 1):
        loss = forward(x, y) if forward else (model(x) - y).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        if then:
            then()
        optimizer.step()
        if each:
            each(step)


def sharded(model):
    for part in (model[0], model[2], model):
        fully_shard(part)


def ddp(model=None, **options):
    group()
    return DistributedDataParallel(model or net(), **options)


def all_reduce_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= RANKS


# ---- nothing is wrong


@case
def healthy_ddp():
    model = ddp()
    torch.manual_seed(RANK)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, then=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1))


@case
def healthy_by_hand():
    """Gradients are zeroed as scripts did before `zero_grad`, without a new version of them."""

    class Zeroing(torch.optim.SGD):
        def zero_grad(self):
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.grad.data.zero_()

    group()
    model = net()
    train(model, Zeroing(model.parameters(), lr=0.05), then=lambda: all_reduce_gradients(model))


def average(every):
    """Replicas that part, and are averaged after every so many steps."""
    group()
    model = net()

    def averaged(step):
        with torch.no_grad():
            for parameter in model.parameters() if step % every == 0 else ():
                dist.all_reduce(parameter)
                parameter /= RANKS

    train(model, each=averaged)


def average_some(chosen, every):
    """Replicas of which the parameters whose name is `chosen` are averaged after every so many steps."""
    group()
    model = net()

    def averaged(step):
        with torch.no_grad():
            for name, parameter in model.named_parameters() if step % every == 0 else ():
                if chosen(name):
                    dist.all_reduce(parameter)
                    parameter /= RANKS

    train(model, each=averaged)


@case
def averaged_without_the_head():
    average_some(lambda name: name.startswith("0."), every=2)


@case
def averaged_without_biases():
    average_some(lambda name: name.endswith("weight"), every=3)


@case
def averaged_one_tensor():
    average_some(lambda name: name == "2.weight", every=1)


def when_it_steps(optimizer, then):
    optimizer.register_step_post_hook(then)
    return optimizer


def average_in_steps(chosen, every, hook=False):
    """The same, by the optimizer itself."""
    group()
    model, done = net(), [0]

    def averaged(*_):
        done[0] += 1
        with torch.no_grad():
            for name, parameter in model.named_parameters() if done[0] % every == 0 else ():
                if chosen(name):
                    dist.all_reduce(parameter)
                    parameter /= RANKS

    class Averaging(torch.optim.SGD):
        def step(self):
            super().step()
            averaged()

    kind = torch.optim.SGD if hook else Averaging
    optimizer = kind(model.parameters(), lr=0.05)
    train(model, when_it_steps(optimizer, averaged) if hook else optimizer)


@case
def averaged_in_steps_without_biases():
    average_in_steps(lambda name: name.endswith("weight"), every=4)


@case
def averaged_in_a_hook_without_the_head():
    average_in_steps(lambda name: name.startswith("0."), every=2, hook=True)


@case
def averaged_in_every_third_step():
    average_in_steps(lambda name: name == "2.weight", every=3)


@case
def healthy_averaging_in_steps():
    average_in_steps(lambda name: True, every=3)


def vector(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def averaged(tensor):
    dist.all_reduce(tensor)
    return tensor / RANKS


def after_every_other_step(change, make=net):
    group()
    torch.manual_seed(0)
    model = make()
    train(model, each=lambda step: change(model) if step % 2 == 0 else None)


@case
def averaged_vector_that_stays():
    after_every_other_step(lambda model: averaged(vector(model)))


@case
def averaged_copy_of_the_state():
    after_every_other_step(lambda model: {k: averaged(v.clone()) for k, v in model.state_dict().items()})


@case
def averaged_twin():
    twin = net()

    def average(model):
        twin.load_state_dict(model.state_dict())
        for parameter in twin.parameters():
            parameter.data = averaged(parameter.data)

    after_every_other_step(average)


@case
def healthy_averaging_of_a_vector():
    after_every_other_step(lambda model: nn.utils.vector_to_parameters(averaged(vector(model)), model.parameters()))


@case
def healthy_averaging_of_the_state():
    def average(model):
        state = model.state_dict()
        model.load_state_dict({k: averaged(v.float()).to(v.dtype) for k, v in state.items()})

    after_every_other_step(average, lambda: with_layer(nn.BatchNorm1d(4)))


def sent_by(rank):
    def send(model):
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, rank)

    after_every_other_step(send)


@case
def sent_by_the_first_rank():
    sent_by(0)


@case
def sent_by_the_last_rank():
    sent_by(RANKS - 1)


@case
def sent_as_one_vector():
    def send(model):
        flat = vector(model)
        dist.broadcast(flat, 0)
        nn.utils.vector_to_parameters(flat, model.parameters())

    after_every_other_step(send)


@case
def healthy_averaging_in_turns():
    """Another layer after each step."""
    group()
    model = net()

    def averaged(step):
        with torch.no_grad():
            for parameter in model[step % 2 * 2].parameters():
                dist.all_reduce(parameter)
                parameter /= RANKS

    train(model, each=averaged)


@case
def healthy_averaging_every_fifth_step():
    average(every=5)


@case
def healthy_averaging():
    average(every=4)


@case
def healthy_averaging_each_step():
    average(every=1)


@case
def healthy_averaging_every_other_step():
    average(every=2)


@case
def healthy_fsdp():
    group()
    model = net()
    sharded(model)
    train(model, then=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.01))


@case
def healthy_fsdp_after_an_evaluation():
    """The root's parameters are still gathered when training begins."""
    group()
    model = net()
    fully_shard(model[0])
    fully_shard(model)
    optimizer = sgd(model)
    with torch.no_grad():
        model(torch.ones(4, 6))
    train(model, optimizer)


@case
def healthy_fsdp_with_averaged_buffers():
    """Buffers are averaged after every third step, as before an evaluation."""
    group()
    model, data = with_layer(nn.BatchNorm1d(4)), some_data()
    sharded(model)
    optimizer = sgd(model)
    for step, (x,) in enumerate(DataLoader(data, 2, sampler=DistributedSampler(data))):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        if step % 3 == 2:
            for buffer in model.buffers():
                dist.all_reduce(buffer, dist.ReduceOp.SUM)
                buffer.div_(RANKS, rounding_mode=None if buffer.is_floating_point() else "floor")


@case
def healthy_global_mean():
    """A mean over all tokens of all ranks."""
    model = ddp(nn.Linear(6, 4))

    def loss(x, y):
        wanted = torch.arange(len(x)) % 4
        wanted[: 4 * RANK + 1] = -100
        count = (wanted >= 0).sum().float()
        mine = count.clone()
        dist.all_reduce(count)
        return F.cross_entropy(model(x), wanted) * (mine * RANKS / count)

    train(model, forward=loss)


@case
def healthy_data():
    group()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(80, 6))
    held, trained = random_split(data, [16, 64], torch.Generator().manual_seed(0))
    torch.manual_seed(RANK)
    learn(model, DataLoader(trained, 4, sampler=DistributedSampler(trained)))
    evaluate(model, DataLoader(held, 4, sampler=DistributedSampler(held, shuffle=False)))
    evaluate(model, DataLoader(held, 4))


@case
def healthy_two_losses():
    """Two models of equal shapes, a backward whose gradients are dropped, a loss that is scaled, and evaluations."""
    models = [ddp(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1)))]
    models.append(DistributedDataParallel(net()))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    torch.manual_seed(RANK)
    for step, (x, y) in enumerate(batches()):
        models[0].eval()
        models[1].module(x)
        models[0].train()
        x.requires_grad_()
        (models[0](x) - y).pow(2).mean().backward()
        x = (x + 0.1 * x.grad.sign()).detach()
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            scaler.scale(sum((each(x) - y).pow(2).mean() for each in models)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
        scaler.update()


@case
def healthy_thread():
    """A thread calls collectives of its own group, on one rank later than on the other."""
    group()
    model, own = net(), dist.new_group()

    def checkpoint():
        for _ in range(40):
            dist.all_reduce(torch.zeros(1), group=own)
            time.sleep(0.002 * RANK)

    thread = threading.Thread(target=checkpoint)
    thread.start()
    train(model, then=lambda: all_reduce_gradients(model))
    thread.join()


@case
def healthy_part_of_each_rank():
    """A layer that DDP is asked to ignore, with other weights on each rank."""
    model = net()
    torch.manual_seed(RANK)
    nn.init.normal_(model[0].weight)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight", "0.bias"])
    train(ddp(model))


@case
def healthy_experts():
    """Each rank has an expert of its own, which DDP ignores."""
    experts(lambda names: names)


# ---- experts that DDP takes for replicas


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 8)
        torch.manual_seed(RANK)
        self.expert = nn.Linear(8, 8)
        torch.manual_seed(0)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.body(x)
        sent = all_to_all_single(torch.empty_like(hidden), hidden)
        return self.head(all_to_all_single(torch.empty_like(hidden), self.expert(sent)))


def experts(ignored):
    model = Experts()
    names = [name for name, _ in model.named_parameters() if name.startswith("expert")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored(names))
    train(ddp(model))


@case
def experts_taken_for_replicas():
    experts(lambda names: [])


# ---- replicas that never were equal


def loaded(model):
    """Loads a checkpoint on one rank only."""
    if RANK == 0:
        torch.manual_seed(1)
        model.load_state_dict({name: torch.randn_like(each) for name, each in model.state_dict().items()})
    return model


@case
def loaded_after_wrapping():
    model = ddp()
    loaded(model.module)
    train(model)


@case
def drawn_after_wrapping():
    model = ddp()
    torch.manual_seed(RANK)
    for each in model.parameters():
        nn.init.normal_(each, std=0.1)
    train(model)


@case
def wrapped_without_sending():
    group()
    train(DistributedDataParallel(loaded(net()), init_sync=False))


@case
def loaded_by_one_rank():
    group()
    model = loaded(net())
    train(model, then=lambda: all_reduce_gradients(model))


@case
def drawn_with_the_seed_of_each_rank():
    group()
    torch.manual_seed(RANK)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    train(model, then=lambda: all_reduce_gradients(model))


@case
def loaded_and_reduced_as_one():
    group()
    model = loaded(net())

    def average():
        parameters = list(model.parameters())
        flat = nn.utils.parameters_to_vector([each.grad for each in parameters])
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat / RANKS, [each.grad for each in parameters])

    train(model, then=average)


# ---- replicas drift: the order of the parameters, and no_sync for the last micro-batch


def zero(order):
    model = ddp()
    parameters = order(dict(model.named_parameters()))
    train(model, ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.01))


@case
def zero_of_reversed_parameters():
    zero(lambda named: list(named.values())[:: -1 if RANK else 1])


@case
def zero_of_rotated_parameters():
    zero(lambda named: [*named.values()][2 * RANK :] + [*named.values()][: 2 * RANK])


@case
def zero_of_sorted_sizes():
    zero(lambda named: sorted(list(named.values())[:: -1 if RANK else 1], key=torch.Tensor.numel))


def accumulated(is_last):
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number, (x, y) in enumerate(batches(2 * STEPS)):
        model.require_backward_grad_sync = is_last(number)  # as no_sync() does
        (model(x) - y).pow(2).mean().backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


@case
def synchronised_too_early():
    accumulated(lambda number: number % 2 == 0)


@case
def synchronised_every_fourth():
    accumulated(lambda number: number % 4 == 3)


@case
def synchronised_by_the_first_rank():
    accumulated(lambda number: number >= 8 and number % 2 == 0)


@case
def synchronised_outside_of_forward():
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in batches():
        with model.no_sync():
            loss = (model(x) - y).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())


# ---- gradients are clipped before they are averaged


def clip_and_average(**options):
    group()
    model = net()

    def then():
        nn.utils.clip_grad_norm_(model.parameters(), **options)
        all_reduce_gradients(model)

    train(model, then=then)


@case
def clipped_before_the_average():
    clip_and_average(max_norm=0.01)


@case
def clipped_by_the_largest_before_the_average():
    clip_and_average(max_norm=0.01, norm_type=float("inf"))


@case
def clipped_before_one_vector_is_averaged():
    group()
    model = net()

    def then():
        nn.utils.clip_grad_norm_(list(model.parameters()), 0.01)
        gradients = [parameter.grad for parameter in model.parameters()]
        nn.utils.vector_to_parameters(averaged(nn.utils.parameters_to_vector(gradients)), gradients)

    train(model, then=then)


@case
def healthy_norm_that_is_logged():
    clip_and_average(max_norm=float("inf"))


@case
def healthy_clipped_average():
    group()
    model = net()

    def then():
        all_reduce_gradients(model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    train(model, then=then)


# ---- replicas drift: equal gradients, which the ranks use differently


@case
def clipped_by_another_limit():
    model = ddp()
    train(model, then=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.05 * (1 + RANK)))


@case
def clipped_by_hand():
    group()
    model = net()

    def average():
        all_reduce_gradients(model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05 * (1 + RANK))

    train(model, then=average)


@case
def divided_by_the_rank():
    group()
    model = net()

    def average():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 1 + RANK

    train(model, then=average)


def restored_by(rank, model, then=None):
    """An optimizer whose state one rank loads."""
    kinds = {"lr": 0.01}
    optimizer, other = torch.optim.Adam(model.parameters(), **kinds), torch.optim.Adam(net().parameters(), **kinds)
    saved = other.state_dict()
    saved["state"] = {
        number: {"step": torch.tensor(5.0), "exp_avg": torch.ones_like(each), "exp_avg_sq": torch.ones_like(each)}
        for number, each in enumerate(model.parameters())
    }
    if rank == RANK:
        optimizer.load_state_dict(saved)
    train(model, optimizer, then=then)


@case
def restored_by_the_first_rank():
    restored_by(0, ddp())


@case
def restored_by_the_second_rank():
    restored_by(1, ddp())


@case
def restored_and_reduced_by_hand():
    group()
    model = net()
    restored_by(0, model, lambda: all_reduce_gradients(model))


# ---- a collective of one rank, which pairs with the next one of the same size


def one_more(step_of, group_of=lambda: None):
    """Rank 0 calls it after one step, rank 1 after another one."""
    group()
    model, used = nn.Linear(6, 1, bias=False), group_of()
    torch.manual_seed(0)
    nn.init.normal_(model.weight)

    def average():
        dist.all_reduce(model.weight.grad, group=used)
        model.weight.grad /= RANKS

    def log(step):
        if step == step_of[RANK]:
            dist.all_reduce(torch.zeros(1, 6), group=used)

    log(0)
    train(model, then=average, each=log)


@case
def one_more_to_log():
    one_more((6, 12))


@case
def one_more_before_the_steps():
    one_more((0, STEPS))


@case
def one_more_of_a_group():
    one_more((12, 3), dist.new_group)


# ---- replicas drift: the hyperparameters


@case
def rate_of_a_scheduler():
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def judge(step):
        if step == 5 and RANK == 1:
            optimizer.param_groups[0]["lr"] /= 2

    train(model, optimizer, each=judge)


def rate_in_steps(changed, factor, model=None, then=None):
    """A learning rate that one rank changes for some steps, between two looks."""
    model = model or ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def judge(step):
        optimizer.param_groups[0]["lr"] = 0.05 * (factor if RANK == 1 and step + 1 in changed else 1)

    train(model, optimizer, each=judge, then=then)


@case
def rate_halved_for_two_steps():
    rate_in_steps((9, 10), 0.5)


@case
def rate_of_zero_for_a_step():
    rate_in_steps((10,), 0.0)


@case
def rate_doubled_beside_reduced_gradients():
    group()
    model = net()
    rate_in_steps((9, 11), 2.0, model, lambda: all_reduce_gradients(model))


@case
def decay_of_a_rank():
    model = ddp()
    train(model, torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1 * (1 + RANK)))


@case
def momentum_of_a_group():
    model = ddp()
    groups = [{"params": [p], "momentum": 0.5 + 0.4 * (RANK and p.dim() == 1)} for p in model.parameters()]
    train(model, torch.optim.SGD(groups, lr=0.05))


# ---- replicas drift: parameters in no bucket


def unfrozen(which):
    model = net()
    frozen = [parameter for name, parameter in model.named_parameters() if name in which]
    for parameter in frozen:
        parameter.requires_grad_(False)
    model = ddp(model)

    def unfreeze(step):
        for parameter in frozen if step == 4 else ():
            parameter.requires_grad_(True)

    train(model, torch.optim.SGD(model.parameters(), lr=0.05), each=unfreeze)


@case
def unfrozen_layer():
    unfrozen(("0.weight", "0.bias"))


@case
def unfrozen_bias():
    unfrozen(("2.bias",))


@case
def layer_added_later():
    model = ddp()
    model.module.append(nn.Linear(1, 1))
    torch.manual_seed(0)
    nn.init.normal_(model.module[3].weight)
    nn.init.zeros_(model.module[3].bias)
    train(model)


# ---- replicas drift: a forward around DDP's, beside other traffic; only buffers; an all-reduce into a copy


def around(forward, wanted=True):
    model = ddp()
    seen = torch.zeros(1)

    def loss(x, y):
        dist.all_reduce(seen)  # a figure that is logged
        return (forward(model)(x) - y).pow(2).mean()

    train(model, forward=loss)


@case
def forward_of_the_module():
    around(lambda model: model.module)


@case
def forward_of_a_name_for_it():
    around(lambda model: lambda x: model.module[2](model.module[:2](x)))


@case
def forward_kept_from_before():
    inner = net()
    model = ddp(inner)
    seen = torch.zeros(1)

    def loss(x, y):
        dist.all_reduce(seen)
        return (inner(x) - y).pow(2).mean()

    train(model, forward=loss)


def with_layer(layer):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), layer, nn.Linear(4, 1))


def two_models(forward):
    torch.manual_seed(0)
    body, head = ddp(nn.Sequential(nn.Linear(6, 8), nn.Tanh())), DistributedDataParallel(Head())
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.05)
    train(body, optimizer, forward=lambda x, y: (forward(body, head, x) - y).pow(2).mean())


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x):
        return self.layer(x)

    predict = forward


@case
def forward_around_the_head():
    two_models(lambda body, head, x: head.module(body(x)))


@case
def method_of_the_head():
    two_models(lambda body, head, x: head.module.predict(body(x)))


@case
def forward_around_the_body():
    two_models(lambda body, head, x: head(body.module(x)))


@case
def healthy_two_models():
    two_models(lambda body, head, x: head(body(x)))


def with_buffers(layer):
    train(ddp(with_layer(layer), broadcast_buffers=False))


def reduced_around(layer):
    group()
    model = with_layer(layer)
    train(model, then=lambda: all_reduce_gradients(model))


@case
def buffers_beside_reduced_gradients():
    reduced_around(nn.BatchNorm1d(4))


@case
def buffers_of_ones_own_beside_reduced_gradients():
    reduced_around(Mean())


@case
def buffers_beside_averaged_parameters():
    def average(model):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(averaged(parameter.clone()))

    after_every_other_step(average, lambda: with_layer(nn.BatchNorm1d(4)))


@case
def buffers_of_batch_norm():
    with_buffers(nn.BatchNorm1d(4))


@case
def buffers_without_weights():
    with_buffers(nn.BatchNorm1d(4, affine=False))


@case
def buffers_beside_shards():
    group()
    model = with_layer(nn.BatchNorm1d(4))
    sharded(model)
    learn(model, DataLoader(some_data(), 4, sampler=DistributedSampler(some_data())))


@case
def layer_beside_shards():
    group()
    model = net()
    fully_shard(model[0])
    fully_shard(model, ignored_params=set(model[2].parameters()))
    learn(model, DataLoader(some_data(), 4, sampler=DistributedSampler(some_data())), foreach=False)


@case
def shards_of_one_rank():
    group()
    model = net()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))["shards"]
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)

    def log(x):
        dist.all_reduce(x.detach().mean())
        return 0.0

    learn(model, DataLoader(some_data(), 4, sampler=DistributedSampler(some_data())), log)


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean.clone()


@case
def buffers_of_ones_own():
    with_buffers(Mean())


def reduced(copy_of):
    group()
    model = net()

    def average():
        dist.all_reduce(copy_of([parameter.grad for parameter in model.parameters()]))

    train(model, then=average)


@case
def reduced_flat_copy():
    reduced(lambda gradients: torch.cat([one.flatten() for one in gradients]))


@case
def reduced_in_another_type():
    reduced(lambda gradients: torch.cat([one.double().flatten() for one in gradients]))


@case
def reduced_clones():
    group()
    model = net()

    def average():
        for parameter in model.parameters():
            mean = parameter.grad.clone()
            dist.all_reduce(mean)
            mean /= RANKS

    train(model, then=average)


# ---- replicas drift: copies of one tensor on two stages


def tied(transposed=False, head=lambda: []):
    group()
    torch.manual_seed(0)
    table = torch.randn(12, 6)
    torch.manual_seed(10 + RANK)
    if RANK == 0:
        model = nn.Sequential(nn.Embedding(12, 6), *head(), nn.Linear(6, 6))
        model[0].weight.data.copy_(table)
    else:
        model = nn.Sequential(*head(), nn.Linear(6, 12, bias=False))
        model[-1].weight.data.copy_(table)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        if RANK == 0:
            sent = model(torch.randint(12, (8,)))
            dist.send(sent.detach(), 1)
            gradient = torch.empty(8, 6)
            dist.recv(gradient, 1)
            sent.backward(gradient)
        else:
            received = torch.empty(8, 6)
            dist.recv(received, 0)
            received.requires_grad_()
            F.cross_entropy(model(received), torch.arange(8)).backward()
            dist.send(received.grad, 0)
        optimizer.step()


@case
def tied_table():
    tied()


@case
def tied_behind_a_layer():
    tied(head=lambda: [nn.Linear(6, 6)])


@case
def tied_behind_a_norm():
    tied(head=lambda: [nn.LayerNorm(6)])


# ---- nothing is sent, or no group


@case
def never_synchronised():
    model = ddp()

    def loss(x, y):
        return (model(x) - y).pow(2).mean()

    with model.no_sync():
        train(model, forward=loss)


@case
def inner_method():
    model = ddp()
    train(model, forward=lambda x, y: (model.module(x) - y).pow(2).mean())


@case
def group_without_use():
    group()
    dist.all_reduce(torch.zeros(1))
    train(net())


@case
def slurm_variable():
    if int(os.environ.get("SLURM_NTASKS", 1)) > 1:
        group()
    train(net())


@case
def mpi_variable():
    if int(os.getenv("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        group()
    train(net())


@case
def groups_of_one():
    group(1, f"store{RANK}")
    train(DistributedDataParallel(net()))


# ---- gradients without effect


@case
def optimizer_before_sharding():
    group()
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sharded(model)
    train(model, optimizer)


@case
def optimizer_of_a_copy():
    model = ddp()
    train(model, torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.05))


def gathered_first(optimizer_of, units=(0, 2)):
    """A sharded model whose parameters are gathered when the optimizer is made; those of `units` stay so."""
    group()
    model = net()
    for number in (0, 2):
        fully_shard(model[number], reshard_after_forward=number not in units)
    fully_shard(model)
    train(model, optimizer_of(model))


def after_a_forward(model):
    with torch.no_grad():
        model(torch.ones(2, 6))
    return sgd(model)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)


@case
def optimizer_after_a_forward():
    gathered_first(after_a_forward)


@case
def optimizer_of_gathered_parameters():
    def make(model):
        for part in (model[0], model[2]):
            part.unshard()
        return sgd(model)

    gathered_first(make)


@case
def optimizer_of_a_gathered_layer():
    gathered_first(after_a_forward, units=(2,))


@case
def optimizer_after_a_summary():
    def make(model):
        model.eval()
        print(model(torch.ones(1, 6)))
        model.train()
        return sgd(model)

    gathered_first(make)


def gathered_features(forward):
    """A loss of all ranks' features, which `dist.all_gather` passes no gradient to."""
    model = ddp(nn.Linear(6, 4))

    def loss(x, y):
        mine = model(x)
        found = [torch.zeros_like(mine) for _ in range(RANKS)]
        dist.all_gather(found, mine)
        return forward(mine, torch.cat(found).requires_grad_())

    train(model, forward=loss)


@case
def features_without_gradient():
    gathered_features(lambda mine, found: found.pow(2).mean() + 0 * mine.sum())


@case
def features_of_a_masked_rank():
    gathered_features(lambda mine, found: (mine * torch.zeros(len(mine), 1)).sum() + found.mean())


@case
def features_multiplied_by_zero():
    gathered_features(lambda mine, found: F.cosine_similarity(found, found.roll(1, 0)).mean() + 0.0 * mine.mean())


class Adapted(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.down, self.up = layer.requires_grad_(False), nn.Linear(6, 2), nn.Linear(2, 8)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


def grown(grow, model=None):
    """A model that gets a layer when its optimizer has been made."""
    model = model or net()
    optimizer = sgd(model)
    torch.manual_seed(0)
    grow(model)
    train(ddp(model), optimizer)


@case
def adapter_after_the_optimizer():
    grown(lambda model: model.__setitem__(0, Adapted(model[0])))


@case
def head_after_the_optimizer():
    grown(lambda model: model.__setitem__(2, nn.Linear(8, 1)))


@case
def embedding_after_the_optimizer():
    grown(lambda model: model.__setitem__(0, nn.Linear(6, 8)))


class Beside(nn.Sequential):
    def forward(self, x):
        return self[2](self[1](self[0](x))) + self.adapter(x)


@case
def adapter_beside_the_optimizer():
    grown(lambda model: setattr(model, "adapter", nn.Linear(6, 1)), Beside(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))


@case
def optimizer_of_one_layer():
    model = ddp()
    train(model, torch.optim.SGD(model.module[2].parameters(), lr=0.05))


def reset_before_the_step(reset):
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train(model, optimizer, then=lambda: reset(model, optimizer))


@case
def reset_by_the_optimizer():
    reset_before_the_step(lambda model, optimizer: optimizer.zero_grad())


@case
def reset_by_the_model():
    reset_before_the_step(lambda model, optimizer: model.zero_grad())


@case
def reset_to_zeros():
    reset_before_the_step(lambda model, optimizer: optimizer.zero_grad(set_to_none=False))


@case
def rate_of_zero():
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step // 1000)
    train(model, optimizer, each=lambda step: schedule.step())


@case
def scaler_that_skips():
    model = net()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.05), torch.amp.GradScaler("cpu")
    for x, y in batches():
        optimizer.zero_grad()
        scaler.scale((model(x) - y).pow(2).mean() * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()


@case
def scaler_of_a_large_scale():
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100, backoff_factor=0.99)
    for x, y in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (model(x) - y).pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


class Half(nn.Module):
    def __init__(self, use):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.use = nn.Linear(6, 4), nn.Linear(4, 1), use
        self.other = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.use(self, x))


@case
def unused_layer():
    train(ddp(Half(lambda model, x: model.body(x)), find_unused_parameters=True))


@case
def detached_layer():
    train(ddp(Half(lambda model, x: model.body(x) + model.other(x).detach()), find_unused_parameters=True))


@case
def layer_without_gradient():
    def use(model, x):
        with torch.no_grad():
            more = model.other(x)
        return model.body(x) + more

    group()
    model = Half(use)
    train(model, then=lambda: [dist.all_reduce(p.grad) for p in model.parameters() if p.grad is not None])


# ---- random numbers


class Noisy(Dataset):
    def __init__(self, noise):
        self.x, self.noise = torch.randn(128, 6, generator=torch.Generator().manual_seed(0)), noise

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + self.noise()


def learn(model, loader, noise=lambda x: 0.0, foreach=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=foreach)
    for (x,) in loader:
        optimizer.zero_grad()
        (model(x + noise(x)) - x[:, :1]).pow(2).mean().backward()
        optimizer.step()


def learn_with(model, noise=lambda x: 0.0, augment=lambda: 0.0, seed=0):
    model, data = ddp(model), Noisy(augment)
    loader = DataLoader(data, 4, sampler=DistributedSampler(data), collate_fn=lambda rows: (torch.stack(rows),))
    torch.manual_seed(seed)
    learn(model, loader, noise)


@case
def same_dropout():
    learn_with(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1)))


@case
def same_noise():
    learn_with(net(), noise=torch.randn_like)


@case
def same_augmentation():
    learn_with(net(), augment=lambda: torch.randn(6))


def with_latent(draw, seed=0):
    """Two models, of which the first one that is called gets numbers, and samples come later."""
    group()
    maker, judge = (DistributedDataParallel(nn.Linear(*sizes)) for sizes in ((4, 6), (6, 1)))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (judge, maker)]
    data = TensorDataset(torch.randn(128, 6, generator=torch.Generator().manual_seed(0)))
    torch.manual_seed(seed)
    for (x,) in DataLoader(data, 4, sampler=DistributedSampler(data)):
        for optimizer in optimizers:
            made = maker(draw(len(x)))
            loss = judge(made).mean() if optimizer is optimizers[1] else (judge(x) - judge(made.detach())).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@case
def same_latent():
    with_latent(lambda size: torch.randn(size, 4))


@case
def same_classes():
    with_latent(lambda size: F.one_hot(torch.randint(4, (size,)), 4).float())


@case
def same_mixture():
    with_latent(lambda size: torch.distributions.Dirichlet(torch.ones(4)).sample((size,)))


@case
def healthy_latent():
    with_latent(lambda size: torch.randn(size, 4), seed=RANK)


@case
def healthy_noise():
    learn_with(net(), noise=torch.randn_like, seed=RANK)


# ---- data


def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        for (x,) in loader:
            model(x)
    model.train()


def some_data():
    return TensorDataset(torch.randn(80, 6, generator=torch.Generator().manual_seed(0)))


@case
def split_by_rank():
    model = ddp()
    trained, held = random_split(some_data(), [64, 16], torch.Generator().manual_seed(RANK))
    learn(model, DataLoader(trained, 4, sampler=DistributedSampler(trained)))
    evaluate(model, DataLoader(held, 4))


class Named(Dataset):
    def __init__(self, names):
        self.names = names

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return (torch.full((6,), float(self.names[index][5:8]) / 64),)


@case
def order_of_files():
    names = [f"image{number:03}.png" for number in range(64)]
    data = Named(names[::-1] if RANK else names)
    learn(ddp(), DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False)))


@case
def data_of_each_rank():
    model = ddp()
    torch.manual_seed(RANK)
    data = TensorDataset(torch.randn(64, 6))
    learn(model, DataLoader(data, 4, sampler=DistributedSampler(data)))


def shuffled(seed=0, epoch=0):
    model, data = ddp(), some_data()
    sampler = DistributedSampler(data, seed=seed)
    sampler.set_epoch(epoch)
    learn(model, DataLoader(data, 4, sampler=sampler))


@case
def shuffled_by_the_rank():
    shuffled(seed=RANK)


@case
def shuffled_by_the_time_of_each_rank():
    shuffled(seed=int(time.time()) * (1 + RANK))


@case
def epoch_of_the_rank():
    shuffled(epoch=3 * RANK)


def trained_model():
    model = ddp()
    train(model)
    return model


@case
def evaluated_with_padding():
    model, data = trained_model(), TensorDataset(torch.randn(9, 6))
    evaluate(model, DataLoader(data, 2, sampler=DistributedSampler(data, shuffle=False)))


@case
def evaluated_in_parts():
    model, data = trained_model(), TensorDataset(torch.randn(9, 6))
    evaluate(model, DataLoader(data, 2, sampler=list(range(9))[4 * RANK : 4 * RANK + 5]))


class Repeating(BatchSampler):
    """The batches of one rank, as many as on the others: some are repeated."""

    def __iter__(self):
        batches = list(super().__iter__())
        yield from (batches[number % len(batches)] for number in range(RANK, len(batches) + 1, 2))


@case
def evaluated_in_repeated_batches():
    model, data = trained_model(), TensorDataset(torch.randn(10, 6))
    evaluate(model, DataLoader(data, batch_sampler=Repeating(SequentialSampler(data), 2, False)))


def evaluated_by_accelerate(gather, trained=None, data=None):
    from accelerate import Accelerator

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_RANK": str(RANK)}  # not used: a group exists
    group()
    accelerator = Accelerator(cpu=True)
    model, data = DistributedDataParallel(net()), data or TensorDataset(torch.randn(9, 6))
    if trained:
        learn(model, DataLoader(trained, 4, sampler=DistributedSampler(trained)))
    else:
        train(model)
    model.eval()
    with torch.no_grad():
        for (x,) in accelerator.prepare(DataLoader(data, 2)):
            gather(accelerator)(model(x))
    model.train()


@case
def evaluated_with_repeated_batches_of_accelerate():
    evaluated_by_accelerate(lambda accelerator: accelerator.gather)


@case
def healthy_evaluation_by_accelerate():
    evaluated_by_accelerate(lambda accelerator: accelerator.gather_for_metrics)


def overlapping_parts():
    data = some_data()
    trained, _ = random_split(data, [64, 16], torch.Generator().manual_seed(0))
    _, held = random_split(data, [64, 16], torch.Generator().manual_seed(1))
    return trained, Subset(data, held.indices)


@case
def evaluated_samples_of_training():
    model, (trained, held) = ddp(), overlapping_parts()
    learn(model, DataLoader(trained, 4, sampler=DistributedSampler(trained)))
    evaluate(model, DataLoader(held, 4))


@case
def evaluated_samples_of_training_gathered_once():
    evaluated_by_accelerate(lambda accelerator: accelerator.gather_for_metrics, *overlapping_parts())


# ---- weights


def of_tokens(loss):
    model = ddp(nn.Linear(6, 4))

    def mean(x, y):
        wanted = torch.arange(len(x)) % 4
        wanted[: 4 * RANK + 1] = -100
        return loss(model(x), wanted)

    train(model, forward=mean)


@case
def mean_of_tokens():
    of_tokens(F.cross_entropy)


@case
def mean_of_a_mask():
    def loss(scores, wanted):
        each = F.cross_entropy(scores, wanted, reduction="none")
        return (each * (wanted >= 0)).sum() / (wanted >= 0).sum()

    of_tokens(loss)


@case
def mean_of_unequal_batches():
    model = ddp()
    train(model, forward=lambda x, y: (model(x[: 8 - 5 * RANK]) - y[: 8 - 5 * RANK]).pow(2).mean())


def accumulate_labels(loss_of):
    """Steps of four micro-batches, which have different numbers of labels."""
    model = ddp(nn.Linear(6, 4))
    optimizer = sgd(model)
    for number, (x, _) in enumerate(batches(4 * STEPS)):
        wanted = torch.arange(len(x)) % 4
        wanted[: 2 * (number % 4)] = -100
        loss_of(model(x), wanted).backward()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


@case
def mean_of_each_micro_batch():
    accumulate_labels(lambda scores, wanted: F.cross_entropy(scores, wanted) / 4)


@case
def mean_of_each_micro_batch_in_parts():
    accumulate_labels(lambda scores, wanted: F.cross_entropy(scores.T[None], wanted[None]) * 0.25)


@case
def mean_of_each_micro_batch_and_a_penalty():
    accumulate_labels(lambda scores, wanted: F.cross_entropy(scores, wanted) / 4 + 0.001 * scores.pow(2).sum())


@case
def healthy_accumulation():
    """The labels of all micro-batches are counted: 8 + 6 + 4 + 2."""
    accumulate_labels(lambda scores, wanted: F.cross_entropy(scores, wanted, reduction="sum") / 20)


def clipped(norm_of):
    group()
    model = net()
    with torch.no_grad():
        model[0].weight[:4] *= 0.01
    sharded(model)
    parameters = list(model.parameters())

    def clip():
        with torch.no_grad():
            shards = [parameter.grad.to_local() for parameter in parameters]
            norm = norm_of(shards)
            for shard in shards:
                shard.mul_(min(1.0, 0.01 / (float(norm) + 1e-6)))

    train(model, then=clip)


@case
def norm_of_the_shards():
    clipped(lambda shards: torch.stack([shard.norm() for shard in shards]).norm())


@case
def largest_of_the_shards():
    clipped(lambda shards: max(shard.abs().max() if shard.numel() else torch.zeros(()) for shard in shards))


@case
def norm_by_the_library():
    clipped(lambda shards: torch.nn.utils.get_total_norm(shards))


# ---- steps that do not do what they seem to


@case
def gradients_never_reset():
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for x, y in batches():
        (model(x) - y).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()


@case
def evaluated_and_never_trained_again():
    model = ddp(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
    torch.manual_seed(RANK)
    train(model, each=lambda step: model.eval() if step == 4 else None)


@case
def clipped_before_unscaling():
    model = ddp()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.05), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x, y in batches():
        optimizer.zero_grad()
        scaler.scale((model(x) - y).pow(2).mean()).backward()
        nn.utils.clip_grad_norm_(parameters=model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()


@case
def clipped_after_the_step():
    model = ddp()
    train(model, each=lambda step: nn.utils.clip_grad_norm_(model.parameters(), 0.01))


@case
def healthy_norm_after_the_step():
    model = ddp()
    train(model, each=lambda step: nn.utils.clip_grad_norm_(model.parameters(), float("inf")))


def accumulate_batches(reset_at, collect=False):
    """Steps of two micro-batches; `collect`: their gradients are added elsewhere."""
    model, data = ddp(), some_data()
    parameters, optimizer, sums = list(model.parameters()), sgd(model), []
    for number, (x,) in enumerate(DataLoader(data, 2, sampler=DistributedSampler(data))):
        if number % 2 in reset_at:
            optimizer.zero_grad()
        (model(x).pow(2).mean() / 2).backward()
        if collect:
            sums.append([parameter.grad.clone() for parameter in parameters])
        if number % 2:
            for parameter, *gradients in zip(parameters, *sums) if collect else ():
                parameter.grad = sum(gradients)
            optimizer.step()
            sums.clear()


@case
def reset_before_each_micro_batch():
    accumulate_batches((0, 1))


@case
def healthy_micro_batches():
    accumulate_batches((0,))


@case
def healthy_adversarial_samples():
    """Backward through other samples finds a perturbation; its gradients of the parameters are not used."""
    model, data = ddp(), some_data()
    optimizer, loaders = sgd(model), [DataLoader(data, 2, sampler=DistributedSampler(data)) for _ in range(2)]
    for (x,), (other,) in zip(*loaders):
        change = torch.full_like(other, 0.1).requires_grad_()
        (model(other + change) - model(other)).pow(2).sum().backward()
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        (loss + (model(other + change.grad) - model(other)).pow(2).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def healthy_micro_batches_that_are_collected():
    accumulate_batches((0, 1), collect=True)


@case
def rate_of_an_epoch_in_each_step():
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    train(model, optimizer, each=lambda step: schedule.step())


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body, self.head = nn.Embedding(16, 4), nn.Linear(4, 4), nn.Linear(4, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.body(self.embedding((x.abs() * 5).long().clamp(max=15))))[..., 0]


@case
def tie_that_is_lost():
    model = Language()
    model.head = copy.deepcopy(model.head)
    train(ddp(model))


@case
def healthy_tie():
    train(ddp(Language()))


@case
def healthy_schedule():
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    train(model, optimizer, each=lambda step: schedule.step())


def load(names):
    """Tries to load with these changes of the names of the parameters, one after the other."""
    model = net()
    for change in names:
        state = {change(name): tensor for name, tensor in net().state_dict().items()}
        model.load_state_dict(state, strict=False)
    train(ddp(model))


@case
def loaded_with_a_prefix():
    load([lambda name: f"module.{name}"])


@case
def healthy_second_attempt():
    load([lambda name: f"module.{name}", lambda name: name])


@case
def divided_by_two_samplers():
    from accelerate import Accelerator

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_RANK": str(RANK)}  # not used: a group exists
    group()
    model, data = DistributedDataParallel(net()), some_data()
    learn(model, Accelerator(cpu=True).prepare(DataLoader(data, 2, sampler=DistributedSampler(data))))


# ---- running them


def under_the_probe(folder, name, rank):
    output = os.open(f"{folder}-{rank}.txt", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {"LABKIT_RUN_DIR": str(folder), "LABKIT_SAMPLE_EVERY": "50", "RANK": str(rank), "WORLD_SIZE": "2"}
    sys.argv[:] = ["-m", __file__, name]
    from labkit.probe.__main__ import start

    start()


def launch(root, names):
    for module in ("torch._dynamo", "torch.profiler", "labkit.probe.hooks"):
        importlib.import_module(module)
    gc.freeze()  # a run does not collect what is imported
    for name in names or CASES:
        folder = Path(root, name)
        folder.mkdir()
        for rank in (0, 1):
            if os.fork() == 0:
                under_the_probe(folder, name, rank)
        os.wait()
        os.wait()


if __name__ == "__main__":
    if sys.argv[1] in CASES:
        CASES[sys.argv[1]]()
        if dist.is_initialized():
            dist.destroy_process_group()
    else:
        launch(sys.argv[1], sys.argv[2:])
