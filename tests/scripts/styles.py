"""Training loops in the styles that people write, one after the other in one process; each tells its name before it
begins."""

import gc
import itertools
import sys

import torch
import torch.nn.functional as F
from several_optimizers import both_before_both, inside_backward, one_loss_for_two, two_optimizers
from small import loader, log, mlp
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader


def plain():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        for x, y in loader():
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for x, _ in loader():
                model(x)
        model.train()


def accumulation():
    """Two micro-batches a step, and an evaluation that stays in train mode."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index, (x, y) in enumerate(loader(48)):
        F.cross_entropy(model(x), y).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        for x, _ in loader():
            model(x)


def lbfgs():
    model, x = nn.Linear(8, 1), torch.randn(16, 8)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        return loss

    first = []
    for _ in range(3):
        first.append(optimizer.step(closure).item())
    log("lbfgs", first_loss=first[0])


class Answer(nn.Module):
    """A model that computes its own loss, called by keyword, and answers in a dict."""

    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, inputs=None, labels=None):
        logits = self.body(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def keyword_batches():
    model = Answer()
    optimizer = torch.optim.AdamW(model.parameters())
    data = [{"inputs": torch.randn(8), "labels": torch.tensor(1)} for _ in range(20)]
    for batch in DataLoader(data, batch_size=5):
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def prefetched():
    """Fetches six batches before it needs the first; a step has two micro-batches."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches, ahead = iter(loader(96)), []
    ahead += [next(batches) for _ in range(4)]
    while ahead:
        ahead += itertools.islice(batches, 2)
        for x, y in (ahead.pop(0), ahead.pop(0)):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def sequence_first():
    """The batch is the second dimension of what the model is called with, and the model is called once per position
    too."""
    cell, head = nn.GRU(8, 4), nn.Linear(4, 3)
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.1)
    for x, y in loader():
        states, _ = cell(x.expand(5, *x.shape))
        F.cross_entropy(sum(head(state) for state in states), y).backward()
        optimizer.step()
        optimizer.zero_grad()


class Trainer:
    def __init__(self):
        self.model = mlp()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu")

    def fit(self):
        for x, y in loader():
            self.loss = F.cross_entropy(self.model(x), y)
            self.scaler.scale(self.loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            log("trainer", true_loss=self.loss.item())


def trainer():
    Trainer().fit()


def range_loop():
    """No loader, and a teacher that is asked inside every step."""
    student, teacher = mlp(), mlp().eval()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(6, 8)
        with torch.no_grad():
            target = teacher(x)
        F.mse_loss(student(x), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    log("teacher", true_loss=1.0)


def by_hand():
    """No module at all."""
    weight = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(2):
        (weight - 1).square().sum().backward()
        optimizer.step()


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = mlp(), nn.Linear(3, 1)

    def forward(self, x):
        return self.head(checkpoint(self.block, x, use_reentrant=False))


def checkpointed():
    model = Checkpointed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, _ in loader():
        model(x).mean().backward()
        optimizer.step()


class Moody(nn.Module):
    """Raises on every other call, deep inside."""

    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Linear(8, 3), 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x if self.calls % 2 else x[:, :5])


def raises_and_goes_on():
    model = Moody()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, _ in loader(48):
        try:
            model(x).mean().backward()
        except RuntimeError:
            continue
        optimizer.step()


class Gradient(nn.Module):
    """Uses a transform of torch.func inside, which bears no saved-tensor hooks."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 1)

    def forward(self, x):
        slope = torch.func.grad(lambda z: self.body(z).sum())(x)
        return self.body(x) + slope.sum()


def transforms():
    model = Gradient()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, _ in loader():
        model(x).mean().backward()
        optimizer.step()


def compiled():
    model = torch.compile(mlp(), backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader():
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


STYLES = [
    plain,
    accumulation,
    lbfgs,
    keyword_batches,
    trainer,
    range_loop,
    by_hand,
    checkpointed,
    raises_and_goes_on,
    transforms,
    compiled,
    two_optimizers,
    both_before_both,
    one_loss_for_two,
    inside_backward,
    prefetched,
    sequence_first,
]

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for style in STYLES:
        if len(sys.argv) < 2 or style.__name__ in sys.argv[1:]:
            log("style", style=style.__name__)
            style()
            gc.collect()
            print("done", style.__name__)
