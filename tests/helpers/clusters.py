"""A real Slurm with two nodes on this host, for tests that submit jobs. It needs the packages of Debian's `slurm-wlm`,
and root, because Slurm's daemons change users and a node has a view of its own of `/etc/hosts`."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from conftest import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "unshare")
NODES = ("labkit1", "labkit2")
_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={place}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool-%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
{nodes}
PartitionName=lab Nodes=ALL Default=YES MaxTime=60:00
"""


def missing() -> str:
    """Why no Slurm can be started here; empty if one can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed (apt-get install slurm-wlm)"
    return "" if os.geteuid() == 0 else "Slurm's daemons on one host need root"


@contextmanager
def slurm(place: Path) -> Iterator[Path]:
    """Starts the daemons and gives the path of slurm.conf; at the end nothing of them is left."""
    host = socket.gethostname()
    short = host.partition(".")[0]
    ports = _free_ports(3)
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={short} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=500 State=UNKNOWN"
        for name, port in zip(NODES, ports[1:])
    )
    (place / "state").mkdir(parents=True)
    conf = place / "slurm.conf"
    conf.write_text(_CONF.format(host=short, ports=ports, place=place, nodes=nodes))
    (place / "hosts").write_text(f"127.0.0.1 localhost {host} {short} {' '.join(NODES)}\n")
    (place / "munge.key").write_bytes(os.urandom(1024))
    (place / "munge.key").chmod(0o600)
    munge = [f"--{name}={place}/munge.{ending}" for name, ending in _MUNGE_FILES]
    own_hosts = ["unshare", "--mount", "sh", "-c", f'mount --bind {place}/hosts /etc/hosts && exec "$@"', "sh"]
    with ExitStack() as started:
        for command in (
            ["munged", "--foreground", "--force", *munge],
            ["slurmctld", "-D"],
            *([*own_hosts, "slurmd", "-D", "-N", name] for name in NODES),
        ):
            started.enter_context(_daemon(command, place, conf))
            if command[0] == "munged":
                wait_until((place / "munge.socket").exists)
        wait_until(lambda: _idle(conf) == len(NODES))
        yield conf


_MUNGE_FILES = (
    ("key-file", "key"),
    ("socket", "socket"),
    ("pid-file", "pid"),
    ("log-file", "log"),
    ("seed-file", "seed"),
)


@contextmanager
def _daemon(command: list[str], place: Path, conf: Path) -> Iterator[None]:
    with open(place / "daemons.log", "ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"SLURM_CONF": str(conf)})
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _idle(conf: Path) -> int:
    """The number of idle nodes."""
    command = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
    own = os.environ | {"SLURM_CONF": str(conf)}
    done = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
    return len(done.stdout.split())


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
