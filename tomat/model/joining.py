"""How the processes of a run find one another: whether there are others, where they meet, and what is missing while the
start waits for them."""

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax

from tomat.base.errors import RetryableError
from tomat.base.layout import COORDINATOR_PORT
from tomat.base.reporting import tell
from tomat.base.stages import StartStages

if TYPE_CHECKING:  # its import takes seconds, before which something should be said
    from levanter.distributed import DistributedConfig

    from tomat.model.relay import Relay

JOIN_SECONDS = 300.0
"""How long the processes of a run may take to find one another. Levanter (0.2.227) gives them half an hour, in silence;
JAX's own limit ends the process by SIGABRT."""
OPEN_SECONDS = 600.0
"""How long libtpu may take to open the chips of a slice."""
HEARTBEAT_SECONDS = 300
"""Seconds after which JAX ends a process because another is gone, by SIGABRT and a page of stacks; `HostWatch` knows
sooner, and says so in a line."""
_relays: "list[Relay]" = []
"""This process's relay, if it has one: `jax.distributed` starts once in a process."""


def missing(how: "DistributedConfig", hosts: Sequence[str] = ()) -> str:
    """What the start waits for, as far as it can be told from here; `hosts`: the addresses of a TPU slice's hosts in
    their order, where they are known."""
    address, count, index = how.coordinator_address, how.num_processes, how.process_id
    if address is None or index is None or count is None:
        return ""
    host, _, port = address.rpartition(":")
    if index > 0:
        if answers(host, int(port)):
            return "the coordinator answers, and waits for another host itself; see what its log names"
        return (
            f"nothing answers at {address}; see that host 0 runs, and that a firewall rule lets the hosts of the slice "
            f"reach tcp {port} of one another"
        )
    joined = connected_to(int(port))
    absent = [f"host {n} ({one})" for n, one in enumerate(hosts) if n > 0 and _ip(one) not in joined]
    named = f": {', '.join(absent[:8])}" if absent else ""
    return (
        f"{max(count - 1 - len(joined), 1)} of {count - 1} other hosts have not come{named}; see that they run, and "
        f"that a firewall rule lets them reach tcp {port} here"
    )


def _ip(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return host


def answers(host: str, port: int, seconds: float = 2.0) -> bool:
    try:
        with socket.create_connection((host, port), timeout=seconds):
            return True
    except OSError:
        return False


def connected_to(port: int) -> set[str]:
    """Addresses from which there is a connection to a port of this process; empty where the system does not tell."""
    import psutil

    try:
        found = psutil.Process().net_connections(kind="tcp")
    except psutil.Error:
        return set()
    # A connection of this process to itself is listed at both ends; the client's end has the port at its far side.
    own = {(one.laddr.ip, one.laddr.port) for one in found if one.raddr and one.raddr.port == port}
    far = [one.raddr for one in found if one.raddr and one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED]
    return {one.ip.removeprefix("::ffff:") for one in far if (one.ip, one.port) not in own}


def joining(given: "DistributedConfig") -> "tuple[DistributedConfig, Sequence[str]] | None":
    """How this process joins others, by its configuration, Slurm or a TPU's metadata, and the addresses of the hosts of
    a TPU slice; without a coordinator's address JAX finds it (Slurm, Open MPI). None: the process is the only one, also
    if only mpi4py is there. Levanter (0.2.227) asks all of JAX's kinds of cluster whether they are there, and mpi4py's
    is wherever the package is; JAX (0.11.1) itself takes it by name only, and then finds no address."""
    from levanter.distributed import DistributedConfig, LevanterSlurmCluster

    from tomat.base.ports.jax import hosts_of_slice, kinds_of_cluster

    present = [kind for kind in kinds_of_cluster() if kind.is_env_present()]
    found = [kind for kind in present if not kind.opt_in_only_method]
    if not found and given == DistributedConfig():
        if present:
            tell(
                f"{', '.join(kind.name for kind in present)} is installed, but no launcher that JAX knows has started "
                "this process: it is taken for the only one. Several need a launcher such as Slurm or Open MPI, or "
                "trainer.distributed.",
                highlight=False,
                soft_wrap=True,
            )
        return None
    address, count, index = given.coordinator_address, given.num_processes, given.process_id
    if LevanterSlurmCluster.is_env_present():
        ids = given.local_device_ids
        ids = LevanterSlurmCluster.get_local_device_ids_for_process() if ids is None else ids
        address = address or LevanterSlurmCluster.get_coordinator_address(int(JOIN_SECONDS))
        count = LevanterSlurmCluster.get_process_count() if count is None else count
        return replace(given, coordinator_address=address, num_processes=count, local_device_ids=ids), ()
    if found and "tpu" in found[0].name:
        kind, port = found[0], os.environ.get("JAX_COORDINATOR_PORT", str(COORDINATOR_PORT))
        address = address or kind.get_coordinator_address(int(JOIN_SECONDS), port)
        count = kind.get_process_count() if count is None else count
        index = kind.get_process_id() if index is None else index
        how = replace(given, coordinator_address=address, num_processes=count, process_id=index)
        return how, hosts_of_slice(kind)
    return given, ()


def join_processes(distributed: "DistributedConfig", stages: StartStages | None = None) -> None:
    """Start `jax.distributed` where there are other processes, within `JOIN_SECONDS` (Levanter gives half an hour), and
    say of each stage what it waits for."""
    from iris.cluster.client.job_info import get_job_info

    if not distributed.initialize_jax_distributed:
        return
    begin = (lambda *_: None) if stages is None else stages.begin
    if get_job_info() is not None:  # of Iris, which has addresses and limits of its own
        begin("waiting for the other tasks of the Iris job")
        return distributed.initialize()
    begin("asking which other hosts there are")
    found = joining(distributed)
    if found is None:
        return
    how, hosts = found
    address, count, index = how.coordinator_address, how.num_processes, how.process_id
    if stages is not None and index is not None and count is not None:
        stages.known_as(index, count)
    where = "the coordinator" if address is None else f"the coordinator at {address}"
    if index == 0 and address is not None:
        port = int(address.rpartition(":")[2])
        if answers("127.0.0.1", port):
            said = f"another process of this host has port {port} already, where the hosts of this run are to meet"
            raise RetryableError(
                f"{said}. End it (`sudo ss -ltnp` names it), or set JAX_COORDINATOR_PORT on all hosts."
            )
        where = f"the other {(count or 1) - 1} hosts, as {where}"
    if count != 1:
        begin(f"waiting for {where}", JOIN_SECONDS, partial(missing, how, hosts))
    if address is not None and index is not None and index > 0:
        from tomat.model.relay import Relay  # needed on a pod alone

        host, _, port = address.rpartition(":")
        _relays.append(Relay(host.strip("[]"), int(port)))
        address = _relays[-1].address
    jax.distributed.initialize(
        address,
        count,
        index,
        how.local_device_ids,
        # Later than tomat's own limit, which says what is missing.
        initialization_timeout=int(JOIN_SECONDS) + 60,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
    )


def when_coordinator_is_cut(act: Callable[[], bool]) -> None:
    """Call `act` when the coordinator's host is gone; if it gives False, JAX ends this process in its own way. `act` is
    never called on host 0, nor where JAX has found the coordinator by itself."""
    for relay in _relays:
        relay.on_cut = act
