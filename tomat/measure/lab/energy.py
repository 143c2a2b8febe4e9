"""Joules of a device, where it counts them.

An NVIDIA GPU counts since its driver was loaded (NVML's `nvmlDeviceGetTotalEnergyConsumption`, millijoules, from Volta
on). The processors of a Linux machine count by package (powercap's `energy_uj`, microjoules, which starts again at
`max_energy_range_uj`); what other processes use is in it. A TPU tells none: neither libtpu 0.0.46 nor jax 0.11.1 has a
counter.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
CPU_SOURCE = "the processors' packages, other processes included"
GPU_SOURCE = "the GPUs' boards"


@dataclass
class EnergyCounter:
    """Joules since some time, summed over devices: `readings` count in `joules_per_count`, and begin at 0 again after
    their `ranges` (None: never)."""

    source: str
    readings: Sequence[Callable[[], int]]
    joules_per_count: float
    ranges: Sequence[int | None]

    def __post_init__(self) -> None:
        self._last = [read() for read in self.readings]

    def joules(self) -> float:
        """Since the last call, or since the counter was made. A device that began again more than once counts short."""
        now = [read() for read in self.readings]
        used = 0
        for new, old, most in zip(now, self._last, self.ranges, strict=True):
            used += new - old if new >= old or most is None else new - old + most
        self._last = now
        return used * self.joules_per_count


def energy_counter(platform: str, local_ids: Sequence[int]) -> EnergyCounter | str:
    """The counter of the devices that a process computes on, by JAX's platform and `local_hardware_id`s, or why there
    is none."""
    if platform in ("gpu", "cuda"):
        return _of_gpus(local_ids)
    return _of_packages(POWERCAP) if platform == "cpu" else f"a {platform} tells none"


def _of_packages(root: Path) -> EnergyCounter | str:
    """The top zones of `powercap`: `intel-rapl:0`, on AMD too. Those below them (`intel-rapl:0:0`) are parts."""
    tops = sorted(zone for zone in root.glob("*:*") if zone.name.count(":") == 1 and (zone / "energy_uj").exists())
    named = {zone: _zone_name(zone) for zone in tops}
    # `psys` is the whole machine, packages and all; `intel-rapl-mmio:0` counts the package of `intel-rapl:0` again.
    zones = [
        zone
        for zone in tops
        if named[zone] != "psys"
        and not (
            zone.name.startswith("intel-rapl-mmio:")
            and any(named[one] == named[zone] for one in tops if one.name.startswith("intel-rapl:"))
        )
    ]
    if not zones:
        return f"{root} has no counter of the processors"
    try:
        ranges = [_count(zone / "max_energy_range_uj") for zone in zones]
        return EnergyCounter(CPU_SOURCE, [partial(_count, zone / "energy_uj") for zone in zones], 1e-6, ranges)
    except (OSError, ValueError) as error:
        return f"{zones[0] / 'energy_uj'} cannot be read: {getattr(error, 'strerror', None) or error}"


def _zone_name(zone: Path) -> str:
    """Such as `package-0`; that of the folder where the kernel writes none."""
    try:
        return (zone / "name").read_text().strip()
    except OSError:
        return zone.name


def _count(file: Path) -> int:
    return int(file.read_text())


def _of_gpus(local_ids: Sequence[int]) -> EnergyCounter | str:
    try:
        import pynvml
    except ImportError:
        from tomat.base.shipped import installs

        return f"nvidia-ml-py is not installed; install it with `{installs('gpu')}`"
    # NVML knows every GPU of the machine, JAX those that CUDA_VISIBLE_DEVICES leaves, counted from 0.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    readings = []
    try:
        pynvml.nvmlInit()
        for local_id in local_ids:
            name = visible.split(",")[local_id].strip() if visible else str(local_id)
            by_index, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
            handle = by_index(int(name)) if name.isdigit() else by_uuid(name)
            readings.append(partial(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle))
        return EnergyCounter(GPU_SOURCE, readings, 1e-3, [None] * len(readings))
    except (pynvml.NVMLError, IndexError) as error:
        return f"NVML does not tell: {error}"
