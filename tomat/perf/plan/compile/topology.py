"""TPU slices on a machine without a TPU: the compiler, its environment, and the mesh of the slice's devices.

libtpu 0.0.46 holds the compiler of every TPU generation, and opens no TPU while it only compiles. It reads its settings
from environment variables before JAX is imported, so a compile runs in a separate process (`process.py`) that is
started with `child_environment`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tomat.base.errors import TomatError
from tomat.base.shipped import installs
from tomat.hardware.chips import TPU_SLICES, Slice, slice_named

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from levanter.utils.mesh import MeshConfig

    from tomat.train.settings.config import TrainConfig


def planned_slice(config: TrainConfig, slice_name: str | None) -> Slice:
    """The slice to plan for: the one asked for, or else the configuration's."""
    name = slice_name or config.slice
    if name is None:
        known = ", ".join(s for s in TPU_SLICES if s.startswith("v6e"))
        raise TomatError(
            f"no slice to plan for: the configuration names none; give --slice ({known}, and v5e-N, v5p-N, v4-N)."
        )
    found = slice_named(name)
    if found.libtpu_topology is None:
        raise TomatError(f"slice '{name}' is not a TPU slice; without the device, a step is compiled for TPUs only.")
    return found


def compiler_version() -> str:
    """`libtpu 0.0.46`, as installed."""
    if importlib.util.find_spec("libtpu") is None:
        said = "the TPU compiler is not installed; install it with"
        raise TomatError(f"{said} `{installs('plan')}` (it needs no TPU).")
    found = importlib.metadata.version("libtpu")
    for requirement in importlib.metadata.requires("jax") or ():
        wanted = re.match(r"libtpu==([\d.]+?)(\.\*)?\s*;", requirement)  # from jax's `tpu` extra
        if wanted is not None and not found.startswith(wanted.group(1)):
            raise TomatError(
                f"libtpu {found} is installed, but jax {importlib.metadata.version('jax')} is released with libtpu "
                f"{wanted.group(1)}, whose program the pod runs. Install it with `{installs('plan')}`."
            )
    return f"libtpu {found}"


PASSED_ON = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Variables that a compiling process gets from its parent. It needs them to start; none of them changes a program."""

WITHHELD = ("JAX_", "XLA_", "LIBTPU_", "TPU_", "PALLAS_", "EQX_", "HALIAX_", "LEVANTER_")
"""Prefixes of variables that could change what is traced or compiled, which only the configuration may decide."""


def child_environment(
    slice_: Slice, libtpu_args: list[str], xla_flags: list[str], library: Path | None = None
) -> dict[str, str]:
    """The whole environment of a process that compiles for `slice_`. Only `PASSED_ON` is from this process's own.

    `TPU_SKIP_MDS_QUERY` keeps libtpu from asking a metadata server which machine this is. `ALLOW_MULTIPLE_LIBTPU_LOAD`
    lets two compiles run side by side (without it: "Internal error when accessing libtpu multi-process lockfile").
    jax 0.11.1 looks for the library in `TPU_LIBRARY_PATH` first.
    """
    passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return {
        **passed_on,
        **({} if library is None else {"TPU_LIBRARY_PATH": str(library)}),
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": slice_.name,
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LIBTPU_INIT_ARGS": " ".join(libtpu_args),
        "XLA_FLAGS": " ".join(xla_flags),
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    }


def withheld_variables() -> list[str]:
    """Variables set here that would change a step when it runs, but do not reach the compile. `JAX_PLATFORMS` changes
    no step."""
    return sorted(name for name in os.environ if name.startswith(WITHHELD) and name != "JAX_PLATFORMS")


def topology_devices(slice_: Slice, compiler: str | None = None) -> list[Any]:
    """The devices of the slice as the compiler describes them, in a process started with `child_environment`. Errors
    name `compiler` (default: the installed one)."""
    from jax.experimental import topologies

    arguments: dict[str, Any] = {"chips_per_host_bounds": list(slice_.chips_per_host_bounds or ())}
    if slice_.chip.name == "v4":
        # A v4 runs with its two cores as one device. The default of the topology would show them as two.
        arguments["chip_config_name"] = "megacore"
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=str(slice_.libtpu_topology), **arguments)
    except Exception as error:  # JaxRuntimeError, for which jax exports no stable name
        said = f"cannot describe {slice_.name} (topology {slice_.libtpu_topology}): {str(error).splitlines()[0]}."
        raise TomatError(f"{compiler or compiler_version()} {said}") from error
    devices = list(described.devices)
    if len(devices) != slice_.n_devices:
        said = f"{len(devices)} devices for {slice_.name}; tomat/hardware/chips.py says {slice_.n_devices}"
        raise TomatError(f"{compiler or compiler_version()} shows {said}.")
    return devices


def slice_mesh(config: TrainConfig, devices: list[Any]) -> Mesh:
    """The mesh that Levanter's trainer makes of these devices, in the order that it uses on the slice."""
    from levanter.utils.mesh import create_mesh_from_axis_specs

    ici, dcn = _axis_shapes(config.trainer_config().mesh, len(devices))
    return create_mesh_from_axis_specs(ici_axes=ici, dcn_axes=dcn, devices=devices)


def data_axis_size(config: TrainConfig, n_devices: int) -> int:
    """The number of devices, out of `n_devices`, over which the trainer splits a batch."""
    mesh = config.trainer_config().mesh
    ici, dcn = _axis_shapes(mesh, n_devices)
    mapped = mesh.resolved_compute_mapping.get("batch", ())
    axes = (mapped,) if isinstance(mapped, str) else mapped
    return math.prod(ici.get(axis, 1) * dcn.get(axis, 1) for axis in axes)


def _axis_shapes(mesh: MeshConfig, n_devices: int) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes of the mesh's axes within a slice, and between slices."""
    try:
        ici, dcn = mesh.axis_shapes(n_devices, 1)
    except ValueError as error:
        raise TomatError(
            f"trainer.mesh does not fit {n_devices} devices ({error}); change trainer.mesh.axes or the slice."
        ) from error
    return dict(ici), dict(dcn)
