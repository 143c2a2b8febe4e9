"""Chips by the name JAX gives them, the slices they come in, and the devices that a run found.

A chip that is not in the table is None, with a warning: no utilisation is better than a wrong one.
"""

import dataclasses
import functools
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from tomat.base.errors import TomatError
from tomat.base.reporting import counted
from tomat.hardware.chip_table import GPUS, TPUS, Chip

CHIPS: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in (*TPUS, *GPUS)})
"""Name -> chip."""

_BY_DEVICE_KIND = {kind.lower(): chip for chip in CHIPS.values() for kind in chip.device_kinds}


def known_chip(device_kind: str) -> Chip | None:
    """The chip that JAX or a profiler calls `device_kind`, in upper or lower case; None if it is not in the table."""
    return _BY_DEVICE_KIND.get(" ".join(device_kind.split()).lower())


def jax_device_kind(device_kind: str) -> str:
    """JAX's name of the chip that a profiler calls `device_kind`; unchanged if the chip is not in the table."""
    chip = known_chip(device_kind)
    return chip.device_kinds[0] if chip is not None else device_kind


@functools.cache
def chip_for_device_kind(device_kind: str) -> Chip | None:
    """`known_chip`, with one warning per process if the chip is not known.

    CPUs have no row, and need no warning: their peak depends on the machine, and nobody asks for their MFU.
    """
    chip = known_chip(device_kind)
    if chip is None and device_kind.lower() != "cpu":
        warnings.warn(
            f"no peak is known for the device kind '{device_kind}', so no MFU is reported; add a row with its "
            "source to tomat/hardware/chip_table.py.",
            stacklevel=2,
        )
    return chip


@dataclass(frozen=True)
class Slice:
    """Chips that one job gets, wired together."""

    name: str
    """Accelerator type, such as v6e-16."""
    chip: Chip
    topology: tuple[int, ...]
    """Chips along each axis of the interconnect."""
    wrap: tuple[bool, ...]
    """Which axes close to a ring."""
    n_hosts: int
    """Machines, each of which runs one process."""
    libtpu_topology: str | None
    """Name for `jax.experimental.topologies.get_topology_desc`; None: not a TPU."""

    @property
    def n_chips(self) -> int:
        return prod(self.topology)

    @property
    def n_devices(self) -> int:
        return self.n_chips * self.chip.jax_devices_per_chip

    @property
    def peak_bf16_flops_per_second(self) -> float:
        return self.n_chips * self.chip.peak_bf16_flops_per_second

    @property
    def chips_per_host_bounds(self) -> tuple[int, int, int] | None:
        """What libtpu must be told about a machine's chips (`chips_per_host_bounds`); None: not a TPU."""
        if self.libtpu_topology is None:
            return None
        if self.n_hosts == 1:
            x, y, z = (*self.topology, 1, 1)[:3]
            return x, y, z
        return 2, 2, 1


# Shapes of Cloud TPU slices: chips along each axis. v6e and v5e (https://cloud.google.com/tpu/docs/v6e, .../v5e): one
# machine holds up to 8 chips, a slice of several machines has 4 on each. v5p, v4 and TPU7x (.../v5p, .../v4,
# .../tpu7x): names count TensorCores, of which a chip has two, and a machine has 4 chips.
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_CUBIC = (
    (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8), (8, 8, 16), (8, 16, 16),
    (16, 16, 16),
)  # fmt: skip
_FLAT_RING = 16
"""Length at which an axis of v5e and v6e closes to a ring: that of the pod (16 x 16)."""
_CUBE = 4
"""Axes of v4, v5p and TPU7x close to rings if every axis is a multiple of this: optical switches join whole cubes."""


def _slices(chip: Chip, prefix: str, topologies: tuple[tuple[int, ...], ...]) -> dict[str, Slice]:
    found = {}
    for topology in topologies:
        n_chips, is_flat = prod(topology), len(topology) == 2
        name = f"{prefix}-{n_chips if is_flat else 2 * n_chips}"
        n_hosts = 1 if n_chips <= 8 and is_flat else n_chips // chip.chips_per_host
        cubes = all(side % _CUBE == 0 for side in topology)
        wrap = tuple(side == _FLAT_RING if is_flat else cubes for side in topology)
        found[name] = Slice(name, chip, topology, wrap, n_hosts, f"{chip.name}:{'x'.join(map(str, topology))}")
    return found


TPU_SLICES: Mapping[str, Slice] = MappingProxyType(
    _slices(CHIPS["v6e"], "v6e", _FLAT)
    | _slices(CHIPS["v5e"], "v5e", _FLAT)
    | _slices(CHIPS["v5e"], "v5litepod", _FLAT)
    | _slices(CHIPS["v5p"], "v5p", _CUBIC)
    | _slices(CHIPS["v4"], "v4", _CUBIC[:-1])  # more than 2,048 chips are not offered as an accelerator type
    | _slices(CHIPS["tpu7x"], "tpu7x", _CUBIC)
)
"""Accelerator type -> slice."""


def slice_named(name: str) -> Slice:
    """The slice of an accelerator type: `v6e-16` (16 chips), `v5p-16` (16 TensorCores, 8 chips), `h100x8` (8 GPUs)."""
    if name in TPU_SLICES:
        return TPU_SLICES[name]
    match = re.fullmatch(r"(.+?)(?:x([1-9]\d*))?", name)
    chip = CHIPS.get(match.group(1)) if match else None
    if match is not None and chip is not None and chip in GPUS:
        n_gpus = int(match.group(2) or 1)
        hosts = -(-n_gpus // chip.chips_per_host)
        if n_gpus <= chip.chips_per_host or n_gpus % chip.chips_per_host == 0:
            return Slice(name, chip, (n_gpus,), (False,), hosts, None)
        n = chip.chips_per_host
        raise TomatError(f"slice is '{name}'; expected up to {n} GPUs, or a multiple of {n}.")
    family = name.split("-")[0]
    known = [s for s in TPU_SLICES if s.split("-")[0] == family] or [
        "v6e-N, v5e-N, v5p-N, v4-N, tpu7x-N (N: 8, 16, 32, ...)",
        f"or a GPU and their number, as in h100x8 ({', '.join(chip.name for chip in GPUS)})",
    ]
    raise TomatError(f"slice '{name}' is not known; expected one of {', '.join(known)}.")


@dataclass(frozen=True)
class FoundDevices:
    """All devices of a run, as JAX shows them. A run's figures are about these devices; the `slice` of its
    configuration only says which devices were asked for."""

    device_kind: str
    """What JAX calls them, such as `TPU v6 lite`; several kinds are separated by commas."""
    n_devices: int
    n_hosts: int | None
    """Processes: one for each machine of a TPU slice, and as many as the user starts elsewhere. None: not known."""

    @classmethod
    def from_words(cls, devices: object, n_hosts: object) -> "FoundDevices | None":
        """The devices that a record states; None if it does not state them."""
        match = re.fullmatch(r"([1-9]\d{0,8}) x (\S.*)", devices) if isinstance(devices, str) else None
        if match is None:
            return None
        hosts = n_hosts if isinstance(n_hosts, int) and not isinstance(n_hosts, bool) and n_hosts > 0 else None
        return cls(match[2], int(match[1]), hosts)

    @property
    def words(self) -> str:
        """The devices as a record states them; `from_words` reads this."""
        return f"{self.n_devices} x {self.device_kind}"

    def __str__(self) -> str:
        return self.words if self.n_hosts is None else f"{self.words} on {counted(self.n_hosts, 'host')}"

    @property
    def chip(self) -> Chip | None:
        """The chip; None for a CPU, and for a chip that is not in the table."""
        return known_chip(self.device_kind)

    @property
    def n_chips(self) -> int:
        """Number of chips. A device of an unknown kind counts as one chip."""
        return self.n_devices // (1 if self.chip is None else self.chip.jax_devices_per_chip)

    @property
    def platform(self) -> str:
        """`tpu`, `gpu` or `cpu`, as the choice of kernels asks for it."""
        if self.device_kind.startswith("TPU"):
            return "tpu"
        return "cpu" if self.device_kind.lower() == "cpu" else "gpu"

    def as_slice(self, asked: str | None = None) -> Slice | None:
        """The slice that these devices form; None if the table has no such chip, or no slice with so many. The name
        `asked` is kept if it is one of several names for the same chips (`v5e-8`, `v5litepod-8`)."""
        chip = self.chip
        if chip is None:
            return None
        if chip in GPUS:
            try:
                found = [slice_named(chip.name if self.n_chips == 1 else f"{chip.name}x{self.n_chips}")]
            except TomatError:  # not a whole number of machines
                return None
        else:
            found = [one for one in TPU_SLICES.values() if one.chip == chip and one.n_chips == self.n_chips]
            found.sort(key=lambda one: one.name != asked)
        if not found:
            return None
        return dataclasses.replace(found[0], n_hosts=self.n_hosts or found[0].n_hosts)

    def difference(self, asked: Slice) -> str | None:
        """What was found and what was expected, if these are not the devices of `asked`; else None."""
        same_chips = self.chip == asked.chip and self.n_chips == asked.n_chips
        # JAX may have one process for each GPU.
        same_hosts = asked.chip not in TPUS or self.n_hosts in (None, asked.n_hosts)
        if same_chips and same_hosts:
            return None
        expected = FoundDevices(asked.chip.device_kinds[0], asked.n_devices, asked.n_hosts)
        return f"expected {expected} ({asked.name}), found {self}"
