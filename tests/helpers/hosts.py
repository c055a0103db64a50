"""Two hosts on this machine: network namespaces with a name and an address each, joined by one cable. They vanish with
the processes that hold them, which end with the test, however it ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

_PROGRAMS = ("ip", "nsenter", "unshare", "hostname")
_HOLD = 'hostname "$0" && ip link set lo up && echo ready && exec cat'


@dataclass(frozen=True)
class Host:
    """A host by the process that holds its namespaces."""

    name: str
    address: str
    holder: int

    def enter(self, *command: str) -> list[str]:
        """The command, as it is started on this host."""
        return ["nsenter", f"--net=/proc/{self.holder}/ns/net", f"--uts=/proc/{self.holder}/ns/uts", *command]

    def labkit(self, *arguments: str, **options: object) -> subprocess.Popen:
        """A command of the lab on this host, which ends with this process."""
        return subprocess.Popen(self.enter(sys.executable, "-m", "labkit", *arguments), text=True, **options)

    def plug(self, state: str) -> None:
        """The cable `up` or `down`."""
        subprocess.run(self.enter("ip", "link", "set", "eth0", state), check=True)


def missing() -> str:
    """Why there can be no two hosts here; empty if there can."""
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    tried = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "network namespaces are not allowed here"


@contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Two hosts whose names neither of them can resolve."""
    with ExitStack() as held:
        hosts = []
        for number in (1, 2):
            name = f"lab-host{number}"
            holder = subprocess.Popen(
                ["unshare", "--net", "--uts", "sh", "-c", _HOLD, name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            held.callback(holder.communicate)
            assert holder.stdout.readline() == "ready\n"
            hosts.append(Host(name, f"10.77.0.{number}", holder.pid))
        first, second = hosts
        cable = ["ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(second.holder)]
        subprocess.run(first.enter(*cable), check=True)
        for host in hosts:
            subprocess.run(host.enter("ip", "address", "add", f"{host.address}/24", "dev", "eth0"), check=True)
            host.plug("up")
        yield hosts
