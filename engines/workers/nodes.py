"""The nodes of a job, and how the processes on them find each other. Standard library only.

Whoever starts the job writes a :class:`JobNodes` where all nodes see it and names the file in ``BATON_NODES``; the driver, on the
first node, starts Ray's head, and one process on each further node joins it (:mod:`engines.workers.ray_node`).

One port is agreed on beforehand, that of Ray's head: it follows from the job's id and is looked at before it is given out. All other ports
are the kernel's choice at the moment of binding, so that neither jobs on one node nor nodes on one host can meet in them.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import json
import os
import socket
import struct
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "BATON_NODES"
CLOSED = "closed"
"""Beside the ranks' logs: the driver is done with all nodes, and a part that ends is no loss any more."""
REGISTRATION_SECONDS = 300.0
"""For all nodes to join, once the head is there. Long, because shared file systems are slow when many start: a part that died is known at once."""
PORTS = range(20000, 32768)
"""Below the ports that Linux gives to connections (net.ipv4.ip_local_port_range), so that a port that was free stays free."""
_STRIDE = 1009
"""To the next try: far from the ports of the jobs that were submitted just before and after. Prime, so all ports are tried."""
_SIOCGIFADDR = 0x8915  # man 7 netdevice
SOCKET_INTERFACES = {
    "GLOO_SOCKET_IFNAME": "{}",
    "NCCL_SOCKET_IFNAME": "={}",
    "HCCL_SOCKET_IFNAME": "={}",
}
"""Variable -> spelling of an interface; for the last two a bare name is a prefix of names."""


class NodesUnreachable(OSError):
    """It cannot be told by which address or interface the nodes of a job reach each other."""


@dataclass(frozen=True)
class JobNodes:
    """The nodes of one start of a job."""

    names: tuple[str, ...]
    """As the scheduler calls them, in the order of ranks; the driver is on the first."""
    ranks_per_node: int
    device: str
    """Device key: cpu, cuda or npu."""
    address: str
    """Of the first node, as the others reach it."""
    port: int
    """Of Ray's head there."""
    token: str
    """Without it nobody joins."""
    interface: str | None
    """Network interface on every node; None: the one of the route between them."""
    logs: str
    """Folder of the ranks' logs, seen by all nodes."""

    @classmethod
    def read(cls) -> JobNodes | None:
        """Those of the job that this process belongs to; None when there is just this node."""
        path = os.environ.get(VARIABLE)
        if path is None:
            return None
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(**values | {"names": tuple(values["names"])})

    def write(self, path: Path) -> None:
        """For the owner's eyes only: it holds the token."""
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)

    def close(self) -> None:
        """The driver needs the further nodes no longer, though its job goes on for a while."""
        Path(self.logs).with_name(CLOSED).touch()


def usable_cpus() -> int:
    """CPUs of this job on this node, or of the affinity mask outside a job; never simply the node's."""
    cpus = os.environ.get("SLURM_CPUS_ON_NODE")
    return int(cpus) if cpus else len(os.sched_getaffinity(0))


def free_port(job: int) -> int:
    """A TCP port for ``job`` that nobody on this node listens on.

    Raises:
        NodesUnreachable: all of ``PORTS`` are taken.
    """
    for attempt in range(len(PORTS)):
        port = PORTS[(job + attempt * _STRIDE) % len(PORTS)]
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
    raise NodesUnreachable(f"all ports from {PORTS.start} to {PORTS.stop - 1} are taken on this node")


def own_address(name: str, peer: str, interface: str | None) -> str:
    """This node's IPv4 address, as the other nodes reach it.

    Args:
        name: of this node.
        peer: name or address of another one.
        interface: whose address it is; None: of the route to ``peer``.

    Raises:
        NodesUnreachable: no such interface, or no route.
    """
    if interface is not None:
        address = interface_addresses().get(interface)
        if address is None:
            known = ", ".join(sorted(interface_addresses()))
            raise NodesUnreachable(
                f"node {name}: no interface {interface!r} with an IPv4 address; there are {known}"
            )
        return address
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect((peer, 9))  # sends nothing
            address = route.getsockname()[0]
        # Nodes that share one host, as those of a test cluster, differ in their names' addresses only.
        return socket.gethostbyname(name) if _is_loopback(address) else address
    except OSError as error:
        raise NodesUnreachable(
            f"node {name}: no route to {peer} ({error}); name the network between the nodes, site.devices.<key>.interface"
        ) from None


def interface_of(address: str) -> str:
    """The interface that has an IPv4 address of this node.

    Raises:
        NodesUnreachable: none has it.
    """
    if _is_loopback(address):
        return "lo"
    for name, own in interface_addresses().items():
        if own == address:
            return name
    raise NodesUnreachable(
        f"no interface of {socket.gethostname()} has the address {address}: {interface_addresses()}"
    )


def interface_addresses() -> dict[str, str]:
    """This node's interfaces that have an IPv4 address."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", os.fsencode(name)[:15])
            try:
                found[name] = socket.inet_ntoa(fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[20:24])
            except OSError:
                continue  # it is down, or has none
    return found


def socket_variables(interface: str) -> dict[str, str]:
    """Variables by which collectives use ``interface``; what the environment's own set-up says of them stays."""
    return {
        variable: os.environ.get(variable, spelling.format(interface))
        for variable, spelling in SOCKET_INTERFACES.items()
    }


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
