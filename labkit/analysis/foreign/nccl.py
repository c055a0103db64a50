"""What NCCL writes with NCCL_DEBUG=INFO: communicators, how their ranks are connected, and what is off. The texts of
the lines: NCCL 2.14 to 2.28, github.com/NVIDIA/nccl, `src/init.cc`, `src/transport`, `src/os/linux.cc`."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from labkit.analysis.diagnose.finding import Finding, shorter
from labkit.analysis.diagnose.known_errors import KNOWN_ERRORS, KnownError
from labkit.analysis.foreign import Table
from labkit.common.units import counted, listed, ranks_in_words

_MOST = 4096  # communicators, hosts, settings or distinct warnings that are remembered
_SHOWN = 16
_NAMED = 4  # hosts in a sentence

# <host>:<process>:<thread> [<CUDA device>] NCCL INFO <text>; a warning has its time and its source file instead
_LINE = re.compile(
    r"(?:^|\s)(?P<host>[\w.-]+):(?P<process>\d+):(?P<thread>\d+) \[(?P<device>-?\d+)\] "
    r"(?:[\w./-]+:\d+ (?:\(\w+\) )?)?NCCL (?P<level>INFO|WARN) (?P<text>.*)"
)
_INIT = re.compile(
    r"comm (?:0x)?\w+ rank (?P<rank>\d+) nranks (?P<ranks>\d+)\b.*?(?:commId 0x(?P<comm>\w+) )?- Init "
    r"(?P<what>START|COMPLETE)"
)
_CHANNEL = re.compile(
    r"Channel \d+(?:/\d+)? : (\d+)\[\w+\] -> (\d+)\[\w+\] (?:\[(?:send|receive)\] )?via (\S+(?: Libfabric\S*)?)"
)
_SETTING = re.compile(r"(NCCL_\w+) set (?:by environment )?to (\S+)")
_VERSION = re.compile(r"NCCL version (\S+)")
_INTERFACE = re.compile(r"Bootstrap ?: ?Using (?:\[\d+\])?([^\s:]+):([^\s<]+)")
_NETWORK = re.compile(r"Using network (.+)")
_WITHOUT = {  # what NCCL says that it does without
    "P2P": re.compile(r"P2P is disabled between|Could not enable P2P"),
    "InfiniBand": re.compile(r"NET/IB ?: ?No device found"),
    "GDR": re.compile(r"GPU Direct RDMA (?:\(\S+\) )?Disabled", re.IGNORECASE),
}
_BROKEN = re.compile(r"Got completion from peer (?P<peer>[^\s<]+)\S* with (?:error |status=)(?:\w+\()?(?P<status>\d+)")
_UNREACHABLE = re.compile(
    r"Call to ibv_modify_qp failed with (?:error )?(?P<error>[^,]+)"
    r"|[Cc]onnect to (?P<peer>\S+?)(?:<\d+>)? (?:failed|returned) ?:? ?"
    r"(?P<says>.*(?:No route|unreachable|timed out|connection abort|exceeded error).*)"
)
_PORT = re.compile(r"NET/IB ?: ?(?P<port>\S+:\d+ )?Got async event ?: (?P<event>port error|local catastrophic error)")
_TWICE = re.compile(r"rank (?P<rank>\d+) of (?P<ranks>\d+) ranks has already checked in")
_RDMA = re.compile(r"NET/(?:IB\w*|(?:AWS )?Libfabric)(?P<direct>/GDRDMA)?$")
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")

_Thread = tuple[str, str, str]  # host, process, thread


@dataclass
class Communicator:
    """One communicator: the ranks that began its initialization with their hosts, and those that ended it."""

    size: int
    hosts: dict[int, str] = field(default_factory=dict)
    complete: set[int] = field(default_factory=set)
    links: dict[tuple[int, int], str] = field(default_factory=dict)
    channels: Counter[tuple[int, int]] = field(default_factory=Counter)

    @property
    def absent(self) -> list[int]:
        """Ranks that did not begin its initialization in these logs."""
        return [rank for rank in range(self.size) if rank not in self.hosts]


class NcclLog:
    """What NCCL wrote, line by line. Rank numbers are those of the communicator, which for the largest one are those of
    the job."""

    def __init__(self) -> None:
        self.communicators: dict[tuple[str, int], Communicator] = {}
        self.settings: dict[str, set[str]] = defaultdict(set)
        self.versions: dict[str, set[str]] = defaultdict(set)  # by host
        self.networks: dict[str, set[str]] = defaultdict(set)  # by host
        self.interfaces: dict[str, set[str]] = defaultdict(set)  # by host
        self.warnings: dict[str, str] = {}  # the first of its kind, by its text without numbers
        self.without: dict[str, str] = {}  # by what is missing, the first line that says so
        self._current: dict[_Thread, Communicator] = {}

    def __bool__(self) -> bool:
        return bool(self.communicators or self.settings or self.versions or self.warnings)

    def add(self, line: str) -> None:
        """A line of a log, of NCCL or not."""
        if "NCCL" not in line or not (found := _LINE.search(line)):
            return
        host, text = found["host"], found["text"]
        thread = host, found["process"], found["thread"]
        for name, pattern in _WITHOUT.items():
            if name not in self.without and pattern.search(text):
                self.without[name] = text
        if found["level"] == "WARN":
            if len(self.warnings) < _MOST:
                self.warnings.setdefault(_NUMBERS.sub("#", text), f"{host}: {text.strip()}")
        elif init := _INIT.search(text):
            self._add_init(thread, init)
        elif channel := _CHANNEL.search(text):
            self._add_channel(thread, *channel.groups())
        else:
            self._add_other(host, text)

    def _add_init(self, thread: _Thread, init: re.Match[str]) -> None:
        size, rank = int(init["ranks"]), int(init["rank"])
        key = init["comm"] or "", size
        if key not in self.communicators and len(self.communicators) >= _MOST:
            return
        comm = self.communicators.setdefault(key, Communicator(size))
        if rank >= size or len(comm.hosts) > 1 << 17:
            return
        comm.hosts[rank] = thread[0]
        self._current[thread] = self._current[thread[0], thread[1], ""] = comm
        if init["what"] == "COMPLETE":
            comm.complete.add(rank)

    def _add_channel(self, thread: _Thread, first: str, second: str, via: str) -> None:
        comm = self._current.get(thread) or self._current.get((thread[0], thread[1], ""))
        if comm is None:  # versions before 2.17 have no line "Init START"
            comm = self.communicators.setdefault(("", 0), Communicator(0))
        pair = int(first), int(second)
        if len(comm.links) < 1 << 17:
            comm.links[pair] = _transport(via)
            comm.channels[pair] += 1

    def _add_other(self, host: str, text: str) -> None:
        for pattern, known in ((_VERSION, self.versions), (_NETWORK, self.networks), (_INTERFACE, self.interfaces)):
            if (found := pattern.search(text)) and (host in known or len(known) < _MOST):
                known[host].add(shorter(found[1], 60))
        if (found := _SETTING.search(text)) and (found[1] in self.settings or len(self.settings) < _MOST):
            self.settings[found[1]].add(shorter(found[2].rstrip("."), 60))

    def join(self, other: NcclLog) -> None:
        """Adds what another file of the job says."""
        for key, comm in other.communicators.items():
            known = self.communicators.setdefault(key, Communicator(comm.size))
            known.hosts |= comm.hosts
            known.complete |= comm.complete
            known.links |= comm.links
            known.channels |= comm.channels
        for mine, theirs in (
            (self.settings, other.settings),
            (self.versions, other.versions),
            (self.networks, other.networks),
            (self.interfaces, other.interfaces),
        ):
            for name, values in theirs.items():
                mine[name] |= values
        self.warnings = other.warnings | self.warnings
        self.without = other.without | self.without

    @property
    def largest(self) -> Communicator | None:
        """The communicator with the most ranks, most often that of the whole job."""
        return max(self.communicators.values(), key=lambda comm: (comm.size, len(comm.links)), default=None)

    def pairs(self) -> Counter[tuple[str, str]]:
        """Pairs of ranks by where they are ("within a node", "between nodes", "unknown") and their transport."""
        found: Counter[tuple[str, str]] = Counter()
        for comm in self.communicators.values():
            for pair, transport in comm.links.items():
                hosts = [comm.hosts.get(rank) for rank in pair]
                apart = "within a node" if hosts[0] == hosts[1] else "between nodes"
                found[apart if None not in hosts else "unknown", transport] += 1
        return found


def _transport(via: str) -> str:
    """`P2P`, `SHM`, `NET/IB`, `NET/IB/GDRDMA`, `NET/Socket`, or the name of a plugin."""
    kind, *rest = via.split("/")
    if kind != "NET" or not rest:
        return kind
    return "/".join(["NET", rest[0], *(["GDRDMA"] if "GDRDMA" in via else [])])


# ---- what is off


def findings(log: NcclLog) -> Iterator[Finding]:
    """What NCCL's lines show to be wrong or slow, each on its own evidence."""
    yield from _known_warning(log, _SHARED_MEMORY)
    yield from _versions(log)
    yield from _loopback(log)
    yield from _incomplete(log)
    yield from _known_warning(log, next(known for known in KNOWN_ERRORS if known.name == "peer_access"))
    yield from _unreachable(log)
    yield from _known_warning(log, _LOCKED_MEMORY)
    yield from _rank_twice(log)
    yield from _port_error(log)
    yield from _broken_transfer(log)
    yield from _sockets(log)
    yield from _without_peer_access(log)
    yield from _network_within_a_node(log)
    yield from _without_gdr(log)


def _warning(log: NcclLog, pattern: str | re.Pattern[str]) -> tuple[str, re.Match[str]] | None:
    """The first warning that matches, with its host."""
    return next(((line, found) for line in log.warnings.values() if (found := re.search(pattern, line))), None)


_SHARED_MEMORY = KnownError(
    "nccl_shared_memory",
    r"(?i)/dev/shm|shared memory segment|failed to (?:extend|create shared memory)",
    "NCCL could not create its segments in /dev/shm",
    "the container's /dev/shm is full or too small: 64 MB is the usual size in Docker and Kubernetes",
    "start the container with --shm-size=8g or --ipc=host; on Kubernetes mount an emptyDir with medium: Memory at"
    " /dev/shm; NCCL_SHM_DISABLE=1 avoids it at the cost of speed",
)
_LOCKED_MEMORY = KnownError(
    "nccl_locked_memory",
    r"Call to ibv_(?:reg|create)_\w+ failed.*Cannot allocate memory",
    "NCCL could not register memory with the network card",
    "the limit of locked memory is too low: 64 KB or 8 MB are usual in containers and for Slurm's daemon",
    "start the container with --ulimit memlock=-1, or set LimitMEMLOCK=infinity for slurmd; `ulimit -l` in the job must"
    " say unlimited",
)


def _known_warning(log: NcclLog, known: KnownError) -> Iterator[Finding]:
    if warned := _warning(log, known.pattern):
        yield Finding(known.name, known.title, shorter(warned[0]), known.cause, known.fix)


def _unreachable(log: NcclLog) -> Iterator[Finding]:
    """A connection that the network refused; what other ranks report follows from it."""
    if not (warned := _warning(log, _UNREACHABLE)):
        return
    line, found = warned
    here = line.partition(":")[0]
    if found["peer"]:
        title = f"{here} cannot connect to {found['peer']}: {shorter(found['says'], 60)}"
        cause = "the address belongs to an interface that this node cannot reach, or a firewall is between the nodes"
        fix = (
            "set NCCL_SOCKET_IFNAME on all nodes to the interface between them (`ip -br address` lists them), and open"
            " all ports between the nodes"
        )
    else:
        title = f"the network card of {here} cannot reach that of another rank: {shorter(found['error'], 60)}"
        cause = (
            "with RoCE, the GID index is wrong, or the networks of the two cards are not routed to each other, as on"
            " rails; with InfiniBand, a port or the subnet manager is down"
        )
        fix = (
            "NCCL_IB_GID_INDEX as `show_gids` lists it for RoCE v2 (often 3), NCCL_CROSS_NIC=0 on rails, NCCL_IB_HCA"
            " for the cards to use; test the two nodes with `ib_write_bw`"
        )
    yield Finding("nccl_unreachable", title, shorter(line), cause, fix)


def _rank_twice(log: NcclLog) -> Iterator[Finding]:
    if warned := _warning(log, _TWICE):
        line, found = warned
        yield Finding(
            "nccl_rank_twice",
            f"two processes came to NCCL as rank {found['rank']} of {found['ranks']}",
            shorter(line),
            "the nodes have the same --node-rank, so that their processes have the same ranks; or two jobs use the same"
            " address and port",
            "give each node its own --node-rank (with the rendezvous c10d torchrun does), and each job its own"
            " --master-port or --rdzv-id",
            ranks=(int(found["rank"]),) if len(found["rank"]) < 8 else (),
        )


def _port_error(log: NcclLog) -> Iterator[Finding]:
    """A port of InfiniBand that went down; transfers that fail follow from it."""
    if warned := _warning(log, _PORT):
        line, found = warned
        yield Finding(
            "nccl_port_error",
            f"a port of InfiniBand or RoCE failed on {line.partition(':')[0]}: {found['port'] or ''}{found['event']}",
            shorter(line),
            "the link went down: a cable, a transceiver, a port of the switch, or the network card itself",
            "look at the port (`ibstat`, `dmesg | grep mlx5`, `ibqueryerrors`), and leave the node out until it is"
            " repaired",
        )


def _broken_transfer(log: NcclLog) -> Iterator[Finding]:
    """A message over InfiniBand that the network card gave up."""
    if (warned := _warning(log, _BROKEN)) and _warning(log, _PORT) is None:
        line, broken = warned
        here = line.partition(":")[0]
        yield Finding(
            "nccl_transfer_failed",
            f"a message over InfiniBand between {here} and {broken['peer']} failed (status {broken['status']})",
            shorter(line),
            "the other side did not answer: its process ended, or a port, cable or switch between the two failed;"
            " status 12 means that all retries were used up, and 5 follows from an earlier failure",
            f"read the log of {broken['peer']} first, whose process may have failed; if none did, check the ports"
            " (ibstat, ibqueryerrors), and leave one of the two nodes out",
        )


def _versions(log: NcclLog) -> Iterator[Finding]:
    """Two versions of NCCL in one job; what follows the `+` is the CUDA that it was built for."""
    by_version = defaultdict(list)
    for host, versions in log.versions.items():
        for version in versions:
            by_version[version.partition("+")[0]].append(host)
    if len(by_version) > 1:
        which = "; ".join(
            f"{version}: {listed(sorted(hosts), _NAMED)}" for version, hosts in sorted(by_version.items())
        )
        yield Finding(
            "nccl_versions",
            "the nodes use different versions of NCCL",
            which,
            "ranks of one communicator exchange structures of NCCL's own, whose layout differs between versions",
            "use the same container image, or the same torch, on all nodes",
        )


def _loopback(log: NcclLog) -> Iterator[Finding]:
    hosts = {host for comm in log.communicators.values() for host in comm.hosts.values()} | set(log.interfaces)
    wrong = {
        host: name
        for host, names in log.interfaces.items()
        for name in names
        if name == "lo" or name.startswith(("docker", "virbr", "veth"))
    }
    if len(hosts) > 1 and wrong:
        name = next(iter(wrong.values()))
        yield Finding(
            "nccl_interface",
            f"NCCL uses the interface {name}, which other nodes cannot reach",
            f"{listed(sorted(wrong), _NAMED)}: Bootstrap : Using {name}",
            "NCCL took the first interface it found, or NCCL_SOCKET_IFNAME names this one",
            "set NCCL_SOCKET_IFNAME on all nodes to the interface between them (`ip -br address` lists them)",
        )


def _incomplete(log: NcclLog) -> Iterator[Finding]:
    """A communicator that no rank completed, although some began: all wait for the absent ones."""
    for comm in log.communicators.values():
        if comm.complete or not comm.hosts or comm.size < 2:
            continue
        started = ranks_in_words([*comm.hosts][:_SHOWN], comm.size)
        absent = comm.absent
        if absent and not comm.links:  # ranks are connected after all have joined
            title = f"{counted(len(absent), 'rank')} of {comm.size} never joined a communicator of NCCL"
            named = ", ".join(map(str, absent[:_SHOWN])) + (", …" if len(absent) > _SHOWN else "")
            cause = (
                f"NCCL has no line of ranks {named} of this communicator: they failed before it, wait elsewhere, cannot"
                " reach rank 0, or their logs are not among these files"
            )
            fix = "look at the logs of these ranks first; every rank of a group must make its first collective"
        else:
            title = f"a communicator of NCCL with {comm.size} ranks was never completed"
            cause = "all ranks began, and connecting them did not end: a firewall, a wrong interface, or a broken link"
            fix = "check the interface (NCCL_SOCKET_IFNAME) and that all ports are open between the nodes; the lines of"
            fix += " NCCL_DEBUG_SUBSYS=INIT,NET,BOOTSTRAP say what it waits for"
        evidence = f'"Init START" of {started} of {comm.size}, and no "Init COMPLETE"'
        yield Finding("nccl_not_initialized", title, evidence, cause, fix, ranks=tuple(absent[:_SHOWN]))
        return


def _sockets(log: NcclLog) -> Iterator[Finding]:
    pairs = log.pairs()
    count = pairs["between nodes", "NET/Socket"]
    used = {name for names in log.networks.values() for name in names}
    hosts = {host for comm in log.communicators.values() for host in comm.hosts.values()}
    if not count and not (len(hosts) > 1 and used == {"Socket"} and not pairs):
        return
    if log.settings.get("NCCL_IB_DISABLE", set()) - {"0"}:
        cause, fix = "NCCL_IB_DISABLE=1 is set", "remove NCCL_IB_DISABLE from the environment of the job"
    elif log.settings.get("NCCL_NET", set()) & {"Socket"}:
        cause, fix = "NCCL_NET=Socket is set", "remove NCCL_NET from the environment of the job"
    else:
        cause = "NCCL found no InfiniBand or RoCE device, and no network plugin (EFA, GPUDirect-TCPX)"
        fix = (
            "if the nodes have InfiniBand, give the container its devices (/dev/infiniband, unlimited memlock) and"
            " libibverbs, and check `ibv_devinfo` in it; in a cloud, install its NCCL plugin; Ethernet only: expected"
        )
    between = f"{counted(count, 'pair')} of ranks via NET/Socket" if count else "Using network Socket"
    yield Finding(
        "nccl_sockets",
        "the nodes communicate over TCP sockets instead of InfiniBand or RoCE",
        shorter("; ".join(filter(None, (between, log.without.get("InfiniBand"))))),
        cause,
        fix,
        kind="slow",
    )


def _without_peer_access(log: NcclLog) -> Iterator[Finding]:
    pairs = log.pairs()
    by_memory = pairs["within a node", "SHM"]
    if not by_memory:
        return
    settings = {"NCCL_P2P_DISABLE": {"0"}, "NCCL_P2P_LEVEL": {"NVL", "PIX", "PXB", "PHB", "SYS"}}
    cause = (
        "the GPUs have no NVLink and no peer access over PCIe: usual for GeForce and T4 cards, for GPUs at two CPUs,"
        " and where IOMMU or ACS is on (virtual machines)"
    )
    fix = (
        "`nvidia-smi topo -p2p r` shows which pairs could; turn ACS off on bare metal; otherwise choose a layout that"
        " sends less: larger batches, gradient accumulation, no tensor parallelism over these pairs"
    )
    name = next((name for name, usual in settings.items() if log.settings.get(name, set()) - usual), "")
    if name:
        cause, fix = f"{name}={next(iter(log.settings[name]))} is set", f"remove {name} from the environment of the job"
    peers = pairs["within a node", "P2P"]
    evidence = f"{counted(by_memory, 'pair')} of ranks of one node via SHM, {peers} via P2P"
    yield Finding(
        "nccl_no_p2p",
        "GPUs of one node exchange data through the memory of the host",
        shorter("; ".join(filter(None, (evidence, log.without.get("P2P"))))),
        cause,
        fix,
        kind="slow",
    )


def _network_within_a_node(log: NcclLog) -> Iterator[Finding]:
    count = sum(number for (where, via), number in log.pairs().items() if where == "within a node" and "NET" in via)
    if not count:
        return
    off = log.settings.get("NCCL_SHM_DISABLE", set()) - {"0"}
    yield Finding(
        "nccl_network_inside",
        "ranks of one node communicate over the network",
        f"{counted(count, 'pair')} of ranks of one node via NET",
        "NCCL_SHM_DISABLE=1 is set"
        if off
        else "neither P2P nor shared memory works between them, most often because each is in another container; on"
        " nodes with a NIC per GPU, NCCL may also choose this for its rails (PXN), which is no fault",
        "remove NCCL_SHM_DISABLE from the environment of the job"
        if off
        else "run all ranks of a node in one container, or with --ipc=host and all GPUs visible (CUDA_VISIBLE_DEVICES"
        " unset, cudaSetDevice by LOCAL_RANK)",
        kind="slow",
    )


def _without_gdr(log: NcclLog) -> Iterator[Finding]:
    pairs = log.pairs()
    used = Counter[bool]()
    for (where, via), number in pairs.items():
        if where == "between nodes" and (rdma := _RDMA.match(via)):
            used[rdma["direct"] is not None] += number
    without = used[False]
    if not without or used[True]:
        return
    off = log.settings.get("NCCL_NET_GDR_LEVEL", set()) & {"LOC", "0"}
    yield Finding(
        "nccl_no_gdr",
        "the network cards read from the memory of the host instead of the GPUs",
        shorter(
            "; ".join(filter(None, (f"{counted(without, 'pair')} via NET without GDRDMA", log.without.get("GDR"))))
        ),
        "NCCL_NET_GDR_LEVEL forbids GPUDirect RDMA" if off else "GPUDirect RDMA is not available on these nodes",
        "remove NCCL_NET_GDR_LEVEL from the environment of the job"
        if off
        else "load the kernel module nvidia-peermem (or use a kernel with DMA-BUF); turn ACS off between GPU and NIC",
        kind="slow",
    )


# ---- tables


def tables(log: NcclLog) -> Iterator[Table]:
    """How ranks are connected, the communicators, and the warnings."""
    pairs = log.pairs()
    if pairs:
        rows = tuple((where, via, str(number)) for (where, via), number in sorted(pairs.items()))
        yield Table("How NCCL connects pairs of ranks", ("where", "transport", "pairs"), rows, ("transport",))
    comms = sorted(log.communicators.values(), key=lambda comm: -comm.size)
    sizes = tuple(
        (
            f"{comm.size} ranks",
            str(len(comm.hosts)),
            str(len(comm.complete)),
            str(len(set(comm.hosts.values()))),
            str(max(comm.channels.values(), default=0) or "–"),
        )
        for comm in comms[:_SHOWN]
        if comm.size
    )
    if sizes:
        yield Table("Communicators of NCCL", ("communicator", "began", "completed", "nodes", "channels"), sizes)
    if log.warnings:
        lines = tuple((shorter(line),) for line in [*log.warnings.values()][:_SHOWN])
        yield Table("Warnings of NCCL, each kind once", ("warning",), lines)


def figures(log: NcclLog) -> dict[str, Any]:
    """What was read as plain values."""
    return {
        "communicators": [
            {"ranks": comm.size, "began": len(comm.hosts), "completed": len(comm.complete), "absent": comm.absent[:256]}
            for comm in log.communicators.values()
        ],
        "pairs": [{"where": where, "transport": via, "pairs": number} for (where, via), number in log.pairs().items()],
        "settings": {name: sorted(values) for name, values in log.settings.items()},
        "versions": {host: sorted(values) for host, values in log.versions.items()},
        "warnings": [*log.warnings.values()][:256],
    }
