"""How long a collective takes on a named machine: by latency and bandwidth of its links, or from a measured table.

`communication` gives the model of a machine by its name; `seconds` and `time` of every model have one interface.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from labkit.prediction.collectives import ALGORITHMS, OPERATIONS, CommunicationModel, Duration, Load
from labkit.prediction.devices import HERE, Device, Link, Rate, check_fits, device
from labkit.prediction.link_table import measured
from labkit.setup.machine import Machine

# Seconds of a call before the first message, by protocol: NCCL, src/graph/tuning.cc, ncclTunerConstantsDefaults (ring).
_CALL = {"simple": 8.4e-6, "low_latency": 6.6e-6}


class Modelled(CommunicationModel):
    """A machine of the table, by the latency-bandwidth model (Hockney, 1994): a call costs its start, a hop for each
    message in a row, and the time of the busiest link. The fastest algorithm and protocol counts, as NCCL chooses.
    """

    def __init__(self, machine: Device):
        """`ValueError` for a machine whose links are not in the table."""
        if machine.inside is None:
            raise ValueError(f"the links of {machine.title} are measured; use communication({machine.name!r})")
        self.title, self.per_node = machine.title, machine.per_node
        self._machine, self._inside = machine, machine.inside
        self._between = machine.between or machine.inside  # of one node, nothing passes between nodes

    def _time(self, operation: str, size: int, ranks: int, nodes: int) -> Duration:
        times = self.by_algorithm(operation, size, ranks, nodes)
        fastest = min(times, key=lambda name: times[name])
        return Duration(times[fastest], "modelled", fastest)

    def by_algorithm(self, operation: str, size: int, ranks: int, nodes: int = 1) -> dict[str, float]:
        """The seconds of each algorithm of an operation of `OPERATIONS`, with its faster protocol; `LookupError` if
        this machine has no such links."""
        check_fits(self._machine, ranks, nodes)
        return {
            name: min(self._by_protocol(algorithm(ranks, nodes), size))
            for name, algorithm in ALGORITHMS[operation].items()
        }

    def _by_protocol(self, load: Load, size: int) -> Iterator[float]:
        for protocol, call in _CALL.items():
            near, far = _rate(self._inside, protocol), _rate(self._between, protocol)
            busiest = max(load.inside / near.bandwidth, load.between / far.bandwidth)
            yield call + load.near * near.hop + load.far * far.hop + size * busiest


def _rate(link: Link, protocol: str) -> Rate:
    return link.simple if protocol == "simple" else link.low_latency


def time_among(model: CommunicationModel, operation: str, size: float, ranks: Sequence[int]) -> Duration:
    """The time of one collective or message among some ranks of the world, by the nodes that they are on; a barrier
    counts as an all-reduce of its bytes, a gather as an all-gather. If nodes have unequal numbers of the ranks, the
    time is that of the next larger number of nodes that divides them evenly. Raises as `CommunicationModel.time` does.
    """
    known = {"gather": "all_gather", "scatter": "broadcast"}.get(operation, operation)
    nodes = len({rank // model.per_node for rank in ranks}) if model.per_node else 1
    nodes = next(count for count in range(nodes, len(ranks) + 1) if len(ranks) % count == 0)
    known = known if known in (*OPERATIONS, "recv", "reduce") else "all_reduce"
    return model.time(known, round(size), len(ranks), nodes)


def communication(name: str, backend: str = "gloo") -> CommunicationModel:
    """The model of communication of a machine: by its name in `DEVICES`, or `here` for what was measured on this
    machine with a `backend`.

    Raises `ValueError` for an unknown name, and `LookupError` if this machine has not been measured.
    """
    machine = device(name)
    return measured(Machine.here(), backend) if machine.name == HERE else Modelled(machine)
