"""The local launcher: turns a resolved Spec and a run folder into a launch plan, a plain value that can be
displayed."""

from __future__ import annotations

import math
import os
import site
import sys
import sysconfig
from pathlib import Path

from labkit.common.processes import TAG
from labkit.launch import ras
from labkit.plan.nodes import Node
from labkit.plan.spec import Spec, SpecError
from labkit.record import clock
from labkit.record.documents import Devices, LaunchPlan
from labkit.record.folder import RunFolder
from labkit.setup.limits import Limits, in_force
from labkit.setup.machine import Machine, NoAddress, interface_of, own_address
from labkit.setup.preflight import LOOPBACK

ENGINE = "local"
_JOIN = 300  # seconds in which all nodes must have started
# added to the environment of every run: each attempt has a store of its own, without keys of the one before it
_COMMON = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_NICER = 1.25  # by which one more degree of niceness lowers a share of the cores: `sched_prio_to_weight` of Linux


def plan(spec: Spec, folder: RunFolder, node: Node | None = None, *, below_page: bool = False) -> LaunchPlan:
    """The launch plan as stored in `launch.json`: `argv`, the additional environment `env`, the working folder `cwd`.

    `spec` must be resolved by `Spec.on`: its device and number of processes are known. With a `node`, torchrun starts
    the ranks of that node alone. If a page follows the run, `below_page`, CPU ranks leave browser and kernel
    their share of the cores.
    """
    limits = in_force()
    return LaunchPlan(
        v=1,
        engine=ENGINE,
        argv=_argv(spec, folder, node),
        env=_environment(spec, folder, node) | _priority(spec, below_page),
        cwd=str(Path.cwd()),
        limit=None if limits.hours is None else limits.hours * 3600,
        lease=_lease(spec, limits, node),
        endpoint=node and node.endpoint,
        ranks_here=node and node.share(spec.processes),
    )


def _lease(spec: Spec, limits: Limits, node: Node | None) -> Devices | None:
    """The devices that the run takes on this machine; None if its GPUs cannot be identified."""
    if spec.device != "cuda":
        wanted = node.share(spec.processes) if node else spec.processes
        return Devices("cpu", wanted, [str(slot) for slot in range(limits.slots)])
    pool = [gpu.uuid for gpu in Machine.here().gpus if gpu.uuid]
    wanted = node.share(spec.nproc) if node else spec.nproc
    return Devices("gpu", wanted, pool) if pool else None


def _argv(spec: Spec, folder: RunFolder, node: Node | None) -> list[str]:
    # The script path is passed as the user wrote it, so that sys.argv[0] is the same as under plain torchrun.
    script = [str(folder.script)] if spec.script is None else ["-m", spec.script] if spec.as_module else [spec.script]
    # like torchrun itself: do not import a random.py from the working folder
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    return [
        *(sys.executable, *safe, "-m", "torch.distributed.run"),
        *(_alone(spec, folder) if node is None else _with_others(spec, node)),
        f"--max-restarts={spec.max_restarts}",
        *("-m", "labkit.probe"),
        *script,
        *spec.args,
    ]


def _alone(spec: Spec, folder: RunFolder) -> list[str]:
    """Instead of --standalone, which opens the store on every network interface."""
    return [
        "--nnodes=1",
        f"--nproc-per-node={spec.processes}",
        "--rdzv-backend=c10d",
        "--rdzv-conf=store_type=file",
        f"--rdzv-endpoint={folder.rendezvous}",
        "--local-addr=127.0.0.1",
        f"--log-dir={folder.logs}",
        "--redirects=3",
    ]


def _with_others(spec: Spec, node: Node) -> list[str]:
    """The store of node 0 listens on all of its interfaces, and nodes know each other by address, because a host's own
    name may mean nothing to the others. The ranks write their own logs, because torchrun knows only their numbers on
    this node."""
    is_host = "true" if node.rank == 0 else "false"
    return [
        f"--nnodes={node.words}",
        f"--nproc-per-node={node.share(spec.processes)}",
        "--rdzv-backend=c10d",
        f"--rdzv-conf=is_host={is_host},join_timeout={_JOIN},last_call_timeout={spec.hang_after}",
        f"--rdzv-endpoint={node.endpoint}",
        f"--rdzv-id={spec.name}",
        f"--local-addr={_address(node)}",
    ]


def _address(node: Node) -> str:
    """The address of this node on the network of the endpoint; `SpecError` if there is none."""
    try:
        return own_address(node.host)
    except NoAddress as error:
        raise SpecError("nodes", f"--rdzv-endpoint {node.endpoint}: {error}") from None


def standing_environment() -> dict[str, str]:
    """The environment of this process with the additions of a typical run with several ranks."""
    return os.environ | _COMMON | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} | import_path()


def _environment(spec: Spec, folder: RunFolder, node: Node | None) -> dict[str, str]:
    common = probe_environment(spec, folder) | (ras.environment() if spec.device == "cuda" else {})
    if node is not None:
        added = common | {"LABKIT_LOGS": str(folder.logs), "PET_RDZV_ENDPOINT": node.endpoint}
        # by default gloo looks up the name of its host, which on many machines is an address that only they reach
        interface = os.environ.get("GLOO_SOCKET_IFNAME") or interface_of(_address(node))
        return added | ({"GLOO_SOCKET_IFNAME": interface} if interface else {})
    return common | {"LABKIT_LOOPBACK": "1", **LOOPBACK}


def _priority(spec: Spec, below_page: bool) -> dict[str, str]:
    """The niceness with which all CPU ranks that share a core get as much of it as one process of other programs."""
    per_core = spec.processes / Machine.here().cores
    if not below_page or spec.device != "cpu" or per_core <= 1:
        return {}
    return {"LABKIT_NICENESS": str(round(math.log(per_core, _NICER)))}


def probe_environment(spec: Spec, folder: RunFolder) -> dict[str, str]:
    """The variables that the probe and the devices of a run need, on whatever engine."""
    added = _COMMON | {TAG: str(folder.path), clock.VARIABLE: clock.reference()}
    added |= {"LABKIT_SAMPLE_EVERY": str(spec.sample_every), "LABKIT_HANG_AFTER": str(spec.hang_after)}
    if spec.tensors:
        added["LABKIT_TENSORS"] = "1"
    if "OMP_NUM_THREADS" not in os.environ and (spec.script is None or spec.device == "cpu" or spec.processes > 1):
        # one CPU rank emulates one device; for several ranks torchrun sets the same, with a warning; and one GPU is
        # compared with several
        added["OMP_NUM_THREADS"] = "1"
    if spec.device == "cpu":
        added["CUDA_VISIBLE_DEVICES"] = ""
    elif "CUDA_DEVICE_ORDER" not in os.environ:
        added["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # so that cuda:0 is device 0 in NVML
    return added | import_path()


def import_path() -> dict[str, str]:
    """PYTHONPATH with this package's folder in front; empty if it is already there or in the interpreter's
    site-packages.
    """
    home = str(Path(__file__).resolve().parents[2])
    installed = {*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values()}
    if home in installed | set(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        return {}
    return {"PYTHONPATH": os.pathsep.join(part for part in (home, os.environ.get("PYTHONPATH")) if part)}
