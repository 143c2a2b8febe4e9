"""Which of JAX's platforms a run looks at."""

import importlib.metadata
import importlib.util
from pathlib import Path

import jax

from tomat.base.reporting import console

DEVICES = Path("/dev")
TPU_DEVICE_FILES = ("accel[0-9]*", "vfio/[0-9]*")
"""Below `DEVICES`, where a Cloud TPU VM has its chips (v4: accel; v5e, v5p, v6e: vfio)."""


def ignore_absent_tpu() -> None:
    """Keep JAX from starting libtpu where it is installed for planning, but no TPU is.

    It would look for one for seconds and complain on standard error. To be called before the first device is touched;
    says so where it decides. Nothing is changed where JAX was told a platform, where a TPU is, or where another plugin
    (a GPU's) is installed.
    """
    if jax.config.jax_platforms or importlib.util.find_spec("libtpu") is None:
        return
    if any(any(DEVICES.glob(pattern)) for pattern in TPU_DEVICE_FILES):
        return
    if not list(importlib.metadata.entry_points(group="jax_plugins")):
        jax.config.update("jax_platforms", "cpu")
        console.print("The TPU's library is installed, but no TPU is here: computing on the CPU.", highlight=False)
