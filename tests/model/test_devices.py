"""The platform is decided without libtpu only where it is installed and no TPU is."""

from types import SimpleNamespace

import pytest

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


STAYS: list[dict] = [{"files": ["accel0"]}, {"files": ["vfio/0"]}, {"libtpu": False}, {"plugins": ["cuda13"]}]


@pytest.mark.parametrize("what", [{}, {"files": ["vfio/vfio"]}, *STAYS, {"platforms": "tpu"}], ids=str)
def test_a_tpu_is_not_looked_for_where_none_is_and_nothing_else_asked_for_and_that_is_said(machine, capsys, what):
    settings, absent = machine(**what), what in ({}, {"files": ["vfio/vfio"]})
    devices.ignore_absent_tpu()
    assert settings.jax_platforms == ("cpu" if absent else what.get("platforms"))
    assert ("no TPU is here: computing on the CPU" in capsys.readouterr().out) == absent
    devices.ignore_absent_tpu()
    settings.jax_platforms = what.get("platforms")
    devices.ignore_absent_tpu(say=False)
    assert settings.jax_platforms == ("cpu" if absent else what.get("platforms")) and capsys.readouterr().out == ""
