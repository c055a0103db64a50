"""Reference solutions of lab 23: the outer step of DiLoCo, and recovery within a step."""

import torch
import torch.distributed as dist

MOMENTS = ("exp_avg", "exp_avg_sq")


class DiLoCo:
    """Moves all replicas to a common point after every `every` steps."""

    def __init__(self, model, every, rate, momentum):
        self.parameters, self.every, self.steps = list(model.parameters()), every, 0
        self.point = [parameter.detach().clone() for parameter in self.parameters]
        self.outer = torch.optim.SGD(self.point, rate, momentum, nesterov=True)

    @torch.no_grad()
    def after_step(self):
        self.steps += 1
        if self.steps % self.every:
            return
        for point, parameter in zip(self.point, self.parameters):
            point.grad = point - parameter
            dist.all_reduce(point.grad)
            point.grad /= dist.get_world_size()
        self.outer.step()
        for point, parameter in zip(self.point, self.parameters):
            parameter.copy_(point)


def recover(model, optimizer, backward, manager, step):
    """Trains one step with those that are alive, and returns the next step."""
    own = None
    while True:
        group, steps = manager.quorum(step)
        if min(steps) < max(steps):
            heal(model, optimizer, group, steps)
        step = max(steps)
        if own is None:
            backward(step)
            own = [parameter.grad for parameter in model.parameters()]
        try:
            for parameter, gradient in zip(model.parameters(), own):
                mean = gradient.clone()
                dist.all_reduce(mean, group=group)
                parameter.grad = mean / group.size()
            ok = True
        except RuntimeError:
            ok = False
        if manager.commit(ok):
            optimizer.step()
            return step + 1


def heal(model, optimizer, group, steps):
    """Sends the whole state of the first rank that is up to date to each rank that is not."""
    source = steps.index(max(steps))
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        state.setdefault("step", torch.zeros(()))
        for name in MOMENTS:
            state.setdefault(name, torch.zeros_like(parameter))
        tensors += [state[name] for name in ("step", *MOMENTS)]
    for tensor in tensors:
        dist.broadcast(tensor, group_src=source, group=group)
