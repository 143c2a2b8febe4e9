"""Energy use of devices that have a counter.

An NVIDIA GPU counts millijoules since its driver was loaded (NVML's `nvmlDeviceGetTotalEnergyConsumption`, from Volta
on). The processors of a Linux machine count microjoules for each package, including those of other processes
(powercap's `energy_uj`, which starts again from 0 at `max_energy_range_uj`). A TPU has no counter, neither in libtpu
0.0.46 nor in jax 0.11.1.
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
    """A counter of joules, summed over devices. `readings` read counts of `joules_per_count` each, which start again
    from 0 after their `ranges` (None: never)."""

    source: str
    readings: Sequence[Callable[[], int]]
    joules_per_count: float
    ranges: Sequence[int | None]

    def __post_init__(self) -> None:
        self._last = [read() for read in self.readings]

    def joules(self) -> float:
        """Joules since the last call, or since the counter was made; too few if a device wrapped more than once."""
        now = [read() for read in self.readings]
        used = 0
        for new, old, most in zip(now, self._last, self.ranges, strict=True):
            used += new - old if new >= old or most is None else new - old + most
        self._last = now
        return used * self.joules_per_count


def energy_counter(platform: str, local_ids: Sequence[int]) -> EnergyCounter | str:
    """The counter for the devices that a process computes on, given JAX's platform and `local_hardware_id`s; or the
    reason why there is none."""
    if platform in ("gpu", "cuda"):
        return _of_gpus(local_ids)
    return _of_packages(POWERCAP) if platform == "cpu" else f"a {platform} does not report it"


def _of_packages(root: Path) -> EnergyCounter | str:
    """The counter of powercap's top zones: `intel-rapl:0`, also on AMD. Zones below (`intel-rapl:0:0`) are parts."""
    tops = sorted(zone for zone in root.glob("*:*") if zone.name.count(":") == 1 and (zone / "energy_uj").exists())
    named = {zone: _zone_name(zone) for zone in tops}
    # `psys` is the whole machine with its packages; `intel-rapl-mmio:0` counts the package of `intel-rapl:0` again.
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
        return f"{root} has no energy counter of the processors"
    try:
        ranges = [_count(zone / "max_energy_range_uj") for zone in zones]
        return EnergyCounter(CPU_SOURCE, [partial(_count, zone / "energy_uj") for zone in zones], 1e-6, ranges)
    except (OSError, ValueError) as error:
        return f"{zones[0] / 'energy_uj'} cannot be read: {getattr(error, 'strerror', None) or error}"


def _zone_name(zone: Path) -> str:
    """The zone's name, such as `package-0`; the name of its folder if the kernel gives none."""
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
    # NVML sees every GPU of the machine. JAX sees only those in CUDA_VISIBLE_DEVICES and numbers them from 0.
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
        return f"NVML does not report it: {error}"
