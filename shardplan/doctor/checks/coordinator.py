"""Checks whether the processes of a run can meet at JAX_COORDINATOR_ADDRESS."""

import errno
import socket
from collections.abc import Iterator

from shardplan.doctor.findings import HostFinding, Level
from shardplan.doctor.subject import HostSubject
from shardplan.runtime.environment import ADDRESS, PROCESS_ID
from shardplan.runtime.processes.hub.messages import host_and_port, listen

CONNECT_S = 3.0
"""Maximum seconds for a connection to one address of process 0."""


def check(subject: HostSubject) -> Iterator[HostFinding]:
    """Listen at the coordinator's port in process 0, and connect to it from all other processes."""
    variables = subject.processes
    if variables is None:
        return
    if variables.address is None:
        yield HostFinding(Level.OK, f"{ADDRESS} is not set: on TPUs JAX detects the processes, elsewhere there is one")
        return
    host, port = host_and_port(variables.address)
    try:
        resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        yield HostFinding(
            Level.ERROR, f"{host} does not resolve: {error.strerror}", remedy=f"correct the host in {ADDRESS}, or DNS"
        )
        return
    addresses = sorted({str(target[0]) for *_, target in resolved})
    yield _check_listening(host, port, addresses) if variables.index == 0 else _check_reachable(host, port, addresses)


def _check_listening(host: str, port: int, addresses: list[str]) -> HostFinding:
    try:
        listen(port).close()
    except OSError as error:
        why = "in use: an earlier run is still there" if error.errno == errno.EADDRINUSE else str(error.strerror)
        return HostFinding(
            Level.ERROR, f"port {port}: {why}", "process 0 listens there", f"end it, or set another port in {ADDRESS}"
        )
    if not any(map(_is_own, addresses)):
        return HostFinding(
            Level.WARNING,
            f"{host} is {', '.join(addresses)}, which is no address of this host",
            f"{PROCESS_ID} 0 on the host that {ADDRESS} names",
            f"set {PROCESS_ID} of this host to another number, or {ADDRESS} to its name",
        )
    return HostFinding(Level.OK, f"process 0 can listen at port {port} of {host}")


def _check_reachable(host: str, port: int, addresses: list[str]) -> HostFinding:
    problems = []
    for address in addresses:
        try:
            socket.create_connection((address, port), CONNECT_S).close()
        except ConnectionRefusedError:
            return HostFinding(Level.OK, f"{host} ({address}) can be reached; nothing listens at port {port} yet")
        except TimeoutError:
            problems.append(f"{address} does not answer within {CONNECT_S:g} s")
        except OSError as error:
            problems.append(f"{address}: {error.strerror}")
        else:
            return HostFinding(
                Level.OK,
                f"port {port} of {host} ({address}) accepts connections: process 0, or another program",
            )
    return HostFinding(
        Level.ERROR,
        f"port {port} of {host} cannot be reached: {'; '.join(problems)}",
        remedy=f"open the port in the firewall between the hosts, or set another one in {ADDRESS}",
    )


def _is_own(address: str) -> bool:
    """Return whether an address belongs to this host; only such an address can be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
