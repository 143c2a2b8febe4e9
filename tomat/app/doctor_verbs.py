"""`tomat doctor`: the facts about an installation that a bug report needs, and whether it computes correctly."""

import argparse
import importlib.metadata
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tomat import __version__
from tomat.base.arguments import add_report, add_verb
from tomat.base.errors import TomatError
from tomat.base.report.model import Facts
from tomat.base.report.terminal import show
from tomat.base.reporting import readable_bytes, tell, write_report
from tomat.base.shipped import PACKAGE, code_details

PACKAGES = ("jax", "jaxlib", "libtpu", "marin-levanter", "marin-haliax", "equinox", "tensorstore", "zarr", "pymatgen")
SELF_TEST = "GaP-zinc-blende-ideal"
"""A held-out cell of two atoms."""
LARGEST_NMAE = 0.012
"""The packaged model is below it on this cell by a factor of two; the sum of atoms has 7.6 %."""
FAILED_STATUS = 1


def register(subparsers: argparse._SubParsersAction) -> None:
    text = "versions, devices and a self-test of some ten seconds, for a bug report"
    parser = add_verb(subparsers, "doctor", text, _run_doctor)
    add_report(parser, "write what was found")


def _run_doctor(args: argparse.Namespace) -> int:
    """Say what is installed and which devices JAX finds, and predict a small held-out cell with the model in the
    package. Exit status 1 if the prediction fails, or is not as good as it was when the model was packaged."""
    found: dict[str, Any] = {
        "tomat": __version__,
        **code_details(),
        "place": str(PACKAGE),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "jax_plugins": sorted(each.name for each in importlib.metadata.entry_points(group="jax_plugins")),
    }
    for name, place in (("disk", Path.cwd()), ("temporary_disk", Path(tempfile.gettempdir()))):
        found[f"{name}_free_bytes"] = shutil.disk_usage(place).free
    tell("looking at the devices, and predicting one cell", highlight=False)
    found |= _devices() | _self_test()
    show(Facts({name: _shown(name, value) for name, value in found.items()}))
    write_report(args.json, found)
    return FAILED_STATUS if "self_test_error" in found else 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> dict[str, Any]:
    import jax

    from tomat.model.devices import ignore_absent_tpu

    ignore_absent_tpu(say=False)
    try:
        return {"devices": [device.device_kind for device in jax.devices()], "jax_backend": jax.default_backend()}
    except RuntimeError as error:  # JAX raises it for a platform that does not start
        return {"devices": [], "devices_error": str(error)}


def _self_test() -> dict[str, Any]:
    """Seconds and NMAE of a prediction, or the reason why it failed."""
    from tomat.data.density.crystal import Crystal
    from tomat.data.density.demo.embedded import load_stored
    from tomat.predict.inference.predictor import load

    started = time.monotonic()
    true = load_stored(SELF_TEST)
    try:
        predicted = load().predict(Crystal.of(true), true.grid_shape)
    except (TomatError, RuntimeError) as error:
        return {"self_test_error": str(error)}
    nmae = float(abs(predicted.rho - true.rho).sum() / true.rho.sum())
    found = {"self_test": SELF_TEST, "self_test_nmae": nmae, "self_test_seconds": time.monotonic() - started}
    if not nmae < LARGEST_NMAE:  # also a NaN
        said = f"NMAE {100 * nmae:.3g} %, expected below {100 * LARGEST_NMAE:g} %"
        found["self_test_error"] = f"{said}: this installation does not compute what the model learnt; install it anew"
    return found


def _shown(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return readable_bytes(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {each or 'not installed'}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
