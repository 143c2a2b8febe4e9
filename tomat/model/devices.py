"""Which of JAX's platforms a process looks at, which devices it has there, and whose log its terminal shows."""

import importlib.metadata
import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from tomat.base.reporting import chosen, level_log, tell

if TYPE_CHECKING:  # its import takes seconds, before which something should be said
    from tomat.hardware.chips import FoundDevices

DEVICES = Path("/dev")
TPU_DEVICE_FILES = ("accel[0-9]*", "vfio/[0-9]*")
"""Below `DEVICES`, where a Cloud TPU VM has its chips (v4: accel; v5e, v5p, v6e: vfio)."""


def ignore_absent_tpu(*, say: bool = True) -> None:
    """Keep JAX from starting libtpu where it is installed for planning, but no TPU is: it would look for one for
    seconds and complain. Call it before the first device is touched. With `say` it prints its decision; leave that out
    where nothing is to be computed. Nothing changes where JAX was told a platform, where a TPU is, or where another
    plugin (a GPU's) is installed."""
    if jax.config.jax_platforms or importlib.util.find_spec("libtpu") is None:
        return
    if any(any(DEVICES.glob(pattern)) for pattern in TPU_DEVICE_FILES):
        return
    if not list(importlib.metadata.entry_points(group="jax_plugins")):
        jax.config.update("jax_platforms", "cpu")
        if say:
            tell("The TPU's library is installed, but no TPU is here: computing on the CPU.", highlight=False)


def traced_device_kind() -> str:
    """JAX's name of the devices that something is traced for: those of the mesh in scope, which may belong to a TPU
    that is not here, else this process's."""
    from tomat.hardware.chips import jax_device_kind

    mesh = jax.sharding.get_abstract_mesh()
    device = jax.devices()[0] if mesh.empty or mesh.abstract_device is None else mesh.abstract_device
    return jax_device_kind(device.device_kind)


def found_devices() -> "FoundDevices":
    """All devices of the run. Call it once the processes have joined."""
    from tomat.hardware.chips import FoundDevices

    kinds = sorted({device.device_kind for device in jax.devices()})
    return FoundDevices(", ".join(kinds), jax.device_count(), jax.process_count())


def quiet_terminal() -> None:
    """Leave the terminal to the progress bar, to what needs attention, and to what `--log_level` asks for; Levanter's
    own log is in the run's folder."""
    level_log()
    # Levanter 0.2.227 warns once for every optional part that a model does not have, some 40 lines for each load.
    logging.getLogger("levanter.tensorstore_serialization").setLevel(
        logging.NOTSET if chosen.log_level < logging.WARNING else logging.ERROR
    )
