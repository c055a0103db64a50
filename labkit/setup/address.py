"""By which of its addresses, and by which interface, this machine reaches another node of a run."""

from __future__ import annotations

import ipaddress
import socket

import psutil


class NoAddress(ValueError):
    """A host cannot be used as the meeting place of nodes; the message is one sentence with the fix."""


def own_address(host: str) -> str:
    """The address of this machine towards `host`, which may be this machine; nothing is sent. Raises `NoAddress`."""
    host = host.strip("[]")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            own = str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise NoAddress(
            f"{host} cannot be reached from this machine ({why}); give an address of node 0 that all nodes reach"
        ) from None
    if ipaddress.ip_address(own.partition("%")[0]).is_loopback and not _is_loopback(host):
        raise NoAddress(
            f"{host} is {own} on this machine, which no other machine reaches (see /etc/hosts); give an address of"
            " node 0 that all nodes reach"
        )
    return own


def interface_of(address: str) -> str:
    """The name of the interface that has an address of this machine; empty if none has."""
    return next(
        (name for name, found in psutil.net_if_addrs().items() if any(one.address == address for one in found)), ""
    )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
