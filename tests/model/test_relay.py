"""A connection through the relay lasts as long as both ends, and where the far one is cut, as long as it is to."""

import os
import signal
import socket
import threading
import time

import pytest

from tomat.model.relay import Relay


@pytest.fixture
def coordinator():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def through(relay: Relay) -> socket.socket:
    host, _, port = relay.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


@pytest.mark.parametrize("dealt_with", [True, False])
def test_what_is_carried_and_who_is_told_of_a_cut(coordinator, dealt_with):
    relay, told = Relay(*coordinator.getsockname()), threading.Event()

    def act() -> bool:
        told.set()
        return dealt_with

    relay.on_cut = act
    near, far = through(relay), coordinator.accept()[0]
    with near, far:
        sent, received = os.urandom(300_000), b""
        near.sendall(sent)
        while len(received) < len(sent):
            received += far.recv(1 << 16)
        far.sendall(b"answer")
        assert received == sent and near.recv(100) == b"answer" and not told.is_set()
        # As a launcher stops a training, with all processes of its group: this one goes on, so that it can say goodbye.
        os.kill(relay._process.pid, signal.SIGTERM)
        far.close()
        assert told.wait(20)
        near.settimeout(0.3 if dealt_with else 20)
        if dealt_with:
            with pytest.raises(TimeoutError):
                near.recv(1)
        else:
            assert near.recv(1) == b""
    relay.close()


def test_a_near_end_that_leaves_is_no_cut(coordinator):
    relay, told = Relay(*coordinator.getsockname()), threading.Event()
    relay.on_cut = lambda: told.set() or True
    near, far = through(relay), coordinator.accept()[0]
    with far:
        near.close()
        assert far.recv(1) == b""
        time.sleep(0.2)
    relay.close()
    assert not told.is_set()
    with pytest.raises(ConnectionRefusedError):
        through(relay)


def test_proxies_are_not_asked_for_this_machine(coordinator, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "10.0.0.0/8")
    monkeypatch.setenv("no_grpc_proxy", "")
    monkeypatch.delenv("no_grpc_proxy")
    Relay(*coordinator.getsockname()).close()
    assert os.environ["no_grpc_proxy"] == "10.0.0.0/8,127.0.0.1"
