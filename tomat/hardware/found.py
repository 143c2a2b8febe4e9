"""The devices that a run found. They decide what its figures are figures of; the `slice` of its configuration only says
which ones were asked for."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from tomat.base.errors import TomatError
from tomat.base.reporting import counted
from tomat.hardware.chip_table import GPUS, TPUS, Chip
from tomat.hardware.chips import TPU_SLICES, Slice, known_chip, slice_named


@dataclass(frozen=True)
class FoundDevices:
    """All devices of a run, as JAX shows them."""

    device_kind: str
    """What JAX calls them, such as `TPU v6 lite`; of several kinds, all, with commas."""
    n_devices: int
    n_hosts: int | None
    """Processes: one for each machine of a TPU slice, and as many as the user starts elsewhere. None: not known."""

    @classmethod
    def from_words(cls, devices: object, n_hosts: object) -> FoundDevices | None:
        """From what a record holds.

        Args:
            devices: Such as `16 x TPU v6 lite`.
            n_hosts: A count.

        Returns:
            None where that is not on record.
        """
        match = re.fullmatch(r"([1-9]\d{0,8}) x (\S.*)", devices) if isinstance(devices, str) else None
        if match is None:
            return None
        hosts = n_hosts if isinstance(n_hosts, int) and not isinstance(n_hosts, bool) and n_hosts > 0 else None
        return cls(match[2], int(match[1]), hosts)

    @property
    def words(self) -> str:
        """As a record has them; `from_words` reads it."""
        return f"{self.n_devices} x {self.device_kind}"

    def __str__(self) -> str:
        return self.words if self.n_hosts is None else f"{self.words} on {counted(self.n_hosts, 'host')}"

    @property
    def chip(self) -> Chip | None:
        """None for a CPU, and for what the table does not have."""
        return known_chip(self.device_kind)

    @property
    def n_chips(self) -> int:
        """A device of an unknown kind counts as one chip."""
        return self.n_devices // (1 if self.chip is None else self.chip.jax_devices_per_chip)

    @property
    def platform(self) -> str:
        """`tpu`, `gpu` or `cpu`, as the choice of kernels asks for it."""
        if self.device_kind.startswith("TPU"):
            return "tpu"
        return "cpu" if self.device_kind.lower() == "cpu" else "gpu"

    def as_slice(self, asked: str | None = None) -> Slice | None:
        """The slice that these devices are.

        Args:
            asked: Its name is kept where it is one of several for the same chips (`v5e-8`, `v5litepod-8`).

        Returns:
            None where the table has no such chip, or no slice of so many.
        """
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
        """What was found and what was expected, where these are not the devices of `asked`; else None."""
        same_chips = self.chip == asked.chip and self.n_chips == asked.n_chips
        # Of GPUs, JAX may have a process each.
        same_hosts = asked.chip not in TPUS or self.n_hosts in (None, asked.n_hosts)
        if same_chips and same_hosts:
            return None
        expected = FoundDevices(asked.chip.device_kinds[0], asked.n_devices, asked.n_hosts)
        return f"expected {expected} ({asked.name}), found {self}"
