"""The platform is decided without libtpu only where it is installed and no TPU is; who is one of several processes."""

from types import SimpleNamespace

import jax
import pytest
from levanter.distributed import DistributedConfig

from tomat.model import devices


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine: its settings of JAX, files below /dev, whether libtpu is there, and JAX's plugins."""

    def make(*, files=(), libtpu=True, plugins=(), platforms=None):
        for name in files:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        settings = SimpleNamespace(jax_platforms=platforms)
        settings.update = lambda name, value: setattr(settings, name, value)
        monkeypatch.setattr(devices, "jax", SimpleNamespace(config=settings))
        monkeypatch.setattr(devices, "DEVICES", tmp_path)
        find = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: object() if libtpu else None))
        entries = SimpleNamespace(entry_points=lambda group: list(plugins))
        monkeypatch.setattr(devices, "importlib", SimpleNamespace(util=find.util, metadata=entries))
        return settings

    return make


@pytest.mark.parametrize("files", [[], ["vfio/vfio"]], ids=["none", "a folder of vfio without a device"])
def test_an_absent_tpu_is_not_looked_for_and_that_is_said(machine, capsys, files):
    settings = machine(files=files)
    devices.ignore_absent_tpu()
    assert settings.jax_platforms == "cpu"
    assert "no TPU is here: computing on the CPU" in capsys.readouterr().out
    devices.ignore_absent_tpu()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "what",
    [{"files": ["accel0"]}, {"files": ["vfio/0"]}, {"libtpu": False}, {"plugins": ["cuda13"]}, {"platforms": "tpu"}],
    ids=str,
)
def test_everything_stays_where_a_tpu_is_or_another_platform(machine, capsys, what):
    settings = machine(**what)
    devices.ignore_absent_tpu()
    assert settings.jax_platforms == what.get("platforms")
    assert capsys.readouterr().out == ""


@pytest.fixture
def mpi4py(monkeypatch, tmp_path):
    """An mpi4py that is installed, as far as JAX looks."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)


def test_an_installed_mpi4py_makes_no_cluster_and_that_is_said(mpi4py, capsys):
    devices.join_processes(DistributedConfig())
    assert not jax.distributed.is_initialized()
    assert "mpi4py is installed, but no launcher" in capsys.readouterr().out


def test_addresses_of_a_configuration_count_beside_an_installed_mpi4py(mpi4py, monkeypatch, capsys):
    given = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *arguments, **words: given.update(arguments=arguments))
    devices.join_processes(DistributedConfig("localhost:1234", 2, 1))
    assert given["arguments"] == ("localhost:1234", 2, 1, None)
    assert capsys.readouterr().out == ""
