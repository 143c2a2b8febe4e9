"""Transformers on the electron densities of crystals, with every cycle of a training step accounted for.

`import tomat` offers these names. The module behind a name is imported when the name is first used.

- `load()`: the predictor of the packaged model. `load(run)`: that of a run, or of a folder that `tomat export` or
  `tomat compress` wrote. `predict(x)` of a predictor takes a file, a pymatgen structure, ASE atoms or a dict.
- `open_density(path)`: reads a density file as a `DensityGrid`.
- `Promolecule`: a sum of atoms, fitted to densities.
- `plan(config, slice)`: the time and memory of a training step on a slice, predicted without the slice.
- `profile(path)`: where the time of a step went, from a trace, a run or a compiled program.
- `mfu(config, slice, step_seconds)`, `mfu(run)`: the utilisation of the chips, by every convention.
"""

import importlib

__version__ = "0.2.0"

# Their types are in `__init__.pyi`.
_PLACES = {
    "DensityGrid": "tomat.data.density.grid.DensityGrid",
    "Promolecule": "tomat.data.density.promolecule.Promolecule",
    "load": "tomat.predict.inference.predictor.load",
    "mfu": "tomat.app.workflow.public.mfu",
    "open_density": "tomat.data.density.io.open_density",
    "plan": "tomat.app.workflow.public.plan",
    "profile": "tomat.perf.profile.load.load_breakdown",
}


def __getattr__(name):
    """A public name, imported as it is used (PEP 562)."""
    if name not in _PLACES:
        raise AttributeError(f"module 'tomat' has no attribute {name!r}; it offers {', '.join(_PLACES)}")
    importlib.import_module("tomat.base.reporting").leave_out_advice()
    module, _, attribute = _PLACES[name].rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def __dir__():
    return sorted([*globals(), *_PLACES])
