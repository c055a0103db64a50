"""One replica of a training that goes on when another replica fails: python replica.py PORT FOLDER NUMBER.

Each replica is a separate torchrun, so that the failure of one ends no other. Before each step, the replicas that are
alive agree on a *quorum*; a replica that comes back gets the state of a peer; and the gradients are averaged over the
quorum. This is the idea of torchft (github.com/meta-pytorch/torchft). What is simpler here: a replica is one rank, and
the lighthouse notices a death by the connection that ends with the process, instead of by missing heartbeats.
"""

import json
import socket
import socketserver
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import ProcessGroupGloo

STEPS, TOGETHER, MOST = 200, 20, 4000  # at least STEPS steps, at last TOGETHER steps of all replicas; at most MOST
REPLICAS = 3
SAMPLES, CONTEXT, WIDTH, RATE = 32, 16, 128, 1e-3

# ---- who is alive: a server, and each replica's connection to it


class Lighthouse(socketserver.ThreadingTCPServer):
    """Gives all replicas that are alive the same answer. A round is over when each of them has asked. `least` replicas
    make the first quorum."""

    daemon_threads = True

    def __init__(self, least):
        super().__init__(("127.0.0.1", 0), _Connection)
        self.port = self.server_address[1]
        self.lock = threading.Lock()
        self.least, self.number, self.stale, self.numbers = least, 0, True, count()
        self.members, self.waiting = set(), {}  # connections; what they ask for
        self.rounds = self.updates = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def changed(self):
        """Ends the round, if nobody is left to wait for. The caller has the lock."""
        asked = {connection: self.waiting[connection] for connection in self.members & self.waiting.keys()}
        kinds = {kind for kind, _ in asked.values()}
        if len(kinds) > 1:
            return self.reply(asked, error="one replica votes while another one asks for a quorum")
        if len(asked) < len(self.members):
            return None
        if kinds == {"vote"}:
            agreed = all(value for _, value in asked.values())
            self.updates += agreed
            self.stale = self.stale or not agreed
            return self.reply(asked, agreed=agreed)
        asked = {connection: value for connection, (kind, value) in self.waiting.items() if kind == "quorum"}
        if len(asked) < self.least:
            return None
        self.number += self.stale or self.members != asked.keys()
        self.members, self.stale, self.least = set(asked), False, 1
        order = sorted(asked, key=lambda connection: connection.number)
        steps = [asked[connection] for connection in order]
        return self.reply(order, number=self.number, steps=steps)

    def reply(self, connections, **answer):
        """Ends a round. The place of a replica in it is its rank."""
        self.rounds += 1
        for rank, connection in enumerate(connections):
            del self.waiting[connection]
            answer["rank"] = rank
            with suppress(OSError):  # its process has just ended, which its own thread notices
                connection.wfile.write(json.dumps(answer).encode() + b"\n")


class _Connection(socketserver.StreamRequestHandler):
    """A replica, as the lighthouse sees it."""

    def handle(self):
        server = self.server
        with server.lock:
            self.number = next(server.numbers)
        try:
            for line in self.rfile:
                kind, value = json.loads(line)
                with server.lock:
                    server.waiting[self] = kind, int(value)
                    server.changed()
        except OSError:
            pass  # the process has ended
        with server.lock:
            server.stale |= self in server.members
            server.members.discard(self)
            server.waiting.pop(self, None)
            server.changed()


class Manager:
    """The connection of a replica to the lighthouse. The replicas of a quorum are the ranks of a process group."""

    def __init__(self, port, folder):
        self._lines = socket.create_connection(("127.0.0.1", port)).makefile("rw")
        self._folder, self._number, self._group = folder, 0, None

    def _ask(self, kind, value):
        print(json.dumps([kind, value]), file=self._lines, flush=True)
        answer = json.loads(self._lines.readline())
        if "error" in answer:
            raise SystemError(answer["error"])
        return answer

    def quorum(self, step):
        """Waits until all replicas that are alive have asked. Returns their process group, and the step that each of
        its ranks has reached; `step` is that of this replica."""
        answer = self._ask("quorum", step)
        if answer["number"] != self._number:
            self._number = answer["number"]
            self._leave()
            self._group = Group(self._folder, self._number, answer["rank"], len(answer["steps"]))
        return self._group, answer["steps"]

    def commit(self, ok):
        """Waits for the vote of all that are left of the quorum: True if all of them are `ok`. A replica that is not
        leaves the group, so that no other one waits for it."""
        if not ok:
            self._leave()
        return self._ask("vote", ok)["agreed"]

    def _leave(self):
        if self._group is not None:
            self._group.close()
            self._group = None


class Group(dist.ProcessGroup):
    """A process group of gloo on this machine that can be left: its connections are closed when nothing refers to the
    one inside any more. `dist.init_process_group` would do, if no other group were there."""

    def __init__(self, folder, number, rank, size):
        super().__init__(rank, size)
        store = dist.PrefixStore(str(number), dist.FileStore(f"{folder}/store", -1))
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(minutes=2)
        gloo = dist.ProcessGroup.BackendType.GLOO
        self._inside = dist.ProcessGroup(store, rank, size)
        self._inside._set_default_backend(gloo)
        try:
            self._inside._register_backend(torch.device("cpu"), gloo, ProcessGroupGloo(store, rank, size, options))
        except RuntimeError:  # a peer has ended before all were connected: calls of this group fail
            self.close()

    def close(self):
        """Leaves the group: calls of the others that wait for this rank fail."""
        self._inside = None


def _passed_on(name):
    def call(self, *args, **kwargs):
        if self._inside is None:
            raise RuntimeError("this group was left; ask for a new quorum")
        return getattr(self._inside, name)(*args, **kwargs)

    return call


for name in ("allreduce", "broadcast", "allgather", "_allgather_base", "reduce", "send", "recv", "barrier"):
    setattr(Group, name, _passed_on(name))

# ---- a step that survives


def train_step(model, optimizer, backward, manager, step):
    """Trains one step, however often it takes. Returns the next step, the loss, and the size of the quorum."""
    while True:
        group, steps = manager.quorum(step)
        try:
            if min(steps) < max(steps):
                heal(model, optimizer, group, steps)
        except RuntimeError:  # a peer has ended: the next quorum says who is left
            manager.commit(False)
            continue
        step = max(steps)
        loss = backward(step)
        try:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= group.size()
            ok = True
        except RuntimeError:  # a peer has ended
            ok = False
        if manager.commit(ok):
            optimizer.step()
            return step + 1, loss, group.size()


def heal(model, optimizer, group, steps):
    """The first rank that is up to date sends parameters and moments to those that are not."""
    source = steps.index(max(steps))
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for name, empty in (("step", torch.zeros(())), *((name, torch.zeros_like(parameter)) for name in MOMENTS)):
            state.setdefault(name, empty)
        for tensor in (parameter.detach(), *(state[name] for name in ("step", *MOMENTS))):
            dist.broadcast(tensor, group_src=source, group=group)


MOMENTS = ("exp_avg", "exp_avg_sq")

# ---- a small model of text


class Model(nn.Module):
    """Predicts a byte from the CONTEXT bytes before it."""

    def __init__(self):
        super().__init__()
        self.bytes = nn.Embedding(256, 32)
        self.layers = nn.Sequential(
            nn.Linear(32 * CONTEXT, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 256)
        )

    def forward(self, context):
        return self.layers(self.bytes(context).flatten(1))


def main(port, folder, number):
    torch.set_num_threads(1)
    torch.manual_seed(number)  # a replica that comes back knows nothing of the others' weights
    with open(socketserver.__file__, "rb") as source:
        text = torch.tensor(list(source.read()))
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    manager = Manager(port, folder)

    def backward(step):
        """The loss of this replica's samples of a step, and its gradients."""
        random = torch.Generator().manual_seed(1000 * step + number)
        starts = torch.randint(len(text) - CONTEXT - 1, (SAMPLES,), generator=random)
        batch = text[starts[:, None] + torch.arange(CONTEXT + 1)]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
        loss.backward()
        return loss.item()

    step = together = 0
    while step < STEPS or (together < TOGETHER and step < MOST):
        before = step
        step, loss, size = train_step(model, optimizer, backward, manager, step)
        together = together + 1 if size == REPLICAS else 0
        if step - before > 1:
            print(f"healed: trains from step {step} on", flush=True)
        if step % 50 == 0:
            print(f"step {step}: loss {loss:.3f} on {size} replicas", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
