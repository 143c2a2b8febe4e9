"""Electron densities on grids: read, written, patched, and the embedded set of real ones.

`grid.DensityGrid` is the density in e/A^3; `io.open_density` reads a CHGCAR, a `rho_gga` Zarr group or a Materials
Project document; `demo` holds the densities that come with the package.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tomat.density.demo.embedded import DemoMaterial, demo_materials, load_demo
    from tomat.density.grid import DensityGrid
    from tomat.density.io import open_density

__all__ = ["DemoMaterial", "DensityGrid", "demo_materials", "load_demo", "open_density"]

_MODULES = {"DensityGrid": "tomat.density.grid", "open_density": "tomat.density.io"}


def __getattr__(name: str) -> Any:
    """What this room exports, on first use: `tomat --help` imports its commands, and NumPy would double that time."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES.get(name, "tomat.density.demo.embedded")), name)
