"""Joules of counters that begin again, of machines that tell none, and of GPUs by NVML's own calls."""

import sys
from types import SimpleNamespace

import pytest

from tomat.measure.lab import energy
from tomat.measure.lab.energy import CPU_SOURCE, EnergyCounter, energy_counter


def zone(root, zone, used, most=1000, **files):
    (root / zone).mkdir(parents=True, exist_ok=True)
    for file, content in {"energy_uj": used, "max_energy_range_uj": most, **files}.items():
        (root / zone / file).write_text(f"{content}\n")


def test_packages_are_summed_and_one_that_began_again_counts_on(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    zone(tmp_path, "intel-rapl:0", 100)
    zone(tmp_path, "intel-rapl:1", 900)
    zone(tmp_path, "intel-rapl:0:0", 5)  # the cores of package 0, which has them already
    counter = energy_counter("cpu", [0])
    assert isinstance(counter, EnergyCounter) and counter.source == CPU_SOURCE
    zone(tmp_path, "intel-rapl:0", 130)
    zone(tmp_path, "intel-rapl:1", 50)
    zone(tmp_path, "intel-rapl:0:0", 600)
    assert counter.joules() == pytest.approx((30 + 150) * 1e-6)
    assert counter.joules() == 0


def test_what_tells_none_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "POWERCAP", tmp_path / "none")
    assert energy_counter("cpu", [0]) == f"{tmp_path / 'none'} has no energy counter of the processors"
    assert energy_counter("tpu", [0]) == "a tpu does not report it"
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    zone(tmp_path, "intel-rapl:0", "locked")
    assert "intel-rapl:0/energy_uj cannot be read" in str(energy_counter("cpu", [0]))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert energy_counter("cuda", [0]) == "nvidia-ml-py is not installed; install it with `uv sync --extra gpu`"


@pytest.mark.parametrize(("visible", "joules"), [(None, 1.0), ("1", 2.0), ("GPU-b", 4.0)])
def test_a_gpu_is_the_one_that_jax_has(monkeypatch, visible, joules):
    used = {0: 5000, 1: 7000, "GPU-b": 7000}
    found = {"nvmlInit": lambda: None, "nvmlDeviceGetTotalEnergyConsumption": used.__getitem__, "NVMLError": KeyError}
    found |= {f"nvmlDeviceGetHandleBy{how}": lambda name: (used[name], name)[1] for how in ("Index", "UUID")}
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(**found))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert energy_counter("gpu", [5]) == "NVML does not report it: 5"
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    counter = energy_counter("gpu", [0])
    assert isinstance(counter, EnergyCounter)
    used |= {0: 6000, 1: 9000, "GPU-b": 11000}
    assert counter.joules() == joules


def test_a_package_counts_once(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)

    def use(joules):
        zone(tmp_path, "intel-rapl:0", joules * 10**6, 10**12, name="package-0")
        zone(tmp_path, "intel-rapl-mmio:0", joules * 10**6, 10**12, name="package-0")
        zone(tmp_path, "intel-rapl:1", 2 * joules * 10**6, 10**12, name="psys")

    use(1)
    counter = energy_counter("cpu", [0])
    use(11)
    assert counter.joules() == pytest.approx(10.0)
