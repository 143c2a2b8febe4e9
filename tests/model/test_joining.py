"""Who is one of several processes, where they meet, and what is said to be missing. Real ones: test_multihost.py."""

import socket
from collections.abc import Iterator
from types import SimpleNamespace

import jax
import pytest
from levanter.distributed import DistributedConfig

from tomat.base.errors import RetryableError
from tomat.base.layout import COORDINATOR_PORT
from tomat.base.ports import jax as port
from tomat.base.stages import StartStages
from tomat.model import joining
from tomat.model.joining import connected_to, missing
from tomat.model.relay import Relay


def test_an_installed_mpi4py_makes_no_cluster_and_addresses_of_a_configuration_count(monkeypatch, tmp_path, capsys):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    joining.join_processes(DistributedConfig())
    assert not jax.distributed.is_initialized()
    assert "mpi4py is installed, but no launcher" in capsys.readouterr().out
    given = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *arguments, **words: given.update(arguments=arguments))
    joining.join_processes(DistributedConfig("localhost:1234", 2, 1))
    assert given["arguments"] == (joining._relays[-1].address, 2, 1, None)
    assert joining._relays[-1].coordinator == "localhost:1234"
    assert capsys.readouterr().out == ""


@pytest.fixture(autouse=True)
def relays(monkeypatch) -> Iterator[list[Relay]]:
    """Those of this test."""
    made: list[Relay] = []
    monkeypatch.setattr(joining, "_relays", made)
    yield made
    for relay in made:
        relay.close()


@pytest.fixture
def pod(monkeypatch) -> list[tuple]:
    """Host 2 of a slice of three; the arguments that `jax.distributed` is started with."""
    kind = SimpleNamespace(
        name="gcetpu",
        opt_in_only_method=False,
        is_env_present=lambda: True,
        get_coordinator_address=lambda timeout, port: f"10.0.0.2:{port}",
        get_process_count=lambda: 3,
        get_process_id=lambda: 2,
        _get_worker_list_in_slice=lambda: ["10.0.0.2", "10.0.0.3", "10.0.0.4"],
    )
    given: list[tuple] = []
    monkeypatch.setattr(port, "kinds_of_cluster", lambda: [kind])
    monkeypatch.setattr(jax.distributed, "initialize", lambda *arguments, **words: given.append((arguments, words)))
    return given


def test_the_hosts_of_a_slice_meet_at_the_port_that_google_opens_and_say_so(pod, monkeypatch, capsys):
    joining.join_processes(DistributedConfig(), StartStages())
    assert COORDINATOR_PORT == 8476 and pod[0][0] == (joining._relays[-1].address, 3, 2, None)
    assert joining._relays[-1].coordinator == "10.0.0.2:8476"
    # Later than tomat's own limit, which says what is missing where JAX aborts.
    assert pod[0][1]["initialization_timeout"] > joining.JOIN_SECONDS
    assert "host 2 of 3: waiting for the coordinator at 10.0.0.2:8476" in capsys.readouterr().out
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "9000")
    joining.join_processes(DistributedConfig())
    assert joining._relays[-1].coordinator == "10.0.0.2:9000"


def test_a_port_that_another_process_has_is_named_before_jax_crashes_on_it(pod):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"localhost:{other.getsockname()[1]}"
        with pytest.raises(RetryableError, match="another process of this host has port"):
            joining.join_processes(DistributedConfig(address, 2, 0))
    assert not pod


def test_what_is_missing_is_told_from_either_side():
    with socket.create_server(("127.0.0.1", 0)) as coordinator:
        number = coordinator.getsockname()[1]
        address, hosts = f"127.0.0.1:{number}", ("127.0.0.1", "10.0.0.3")
        lone = missing(DistributedConfig(address, 2, 0), hosts)
        assert "1 of 1 other hosts have not come: host 1 (10.0.0.3)" in lone and f"tcp {number}" in lone
        assert "waits for another host itself" in missing(DistributedConfig(address, 3, 1))
        # A connection of this process to itself is no other host.
        with socket.create_connection(("127.0.0.1", number)), coordinator.accept()[0]:
            assert connected_to(number) == set()
    assert f"nothing answers at {address}" in missing(DistributedConfig(address, 3, 1))
