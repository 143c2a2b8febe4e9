from tomat.app.workflow.public import mfu as mfu
from tomat.app.workflow.public import plan as plan
from tomat.data.density.grid import DensityGrid as DensityGrid
from tomat.data.density.io import open_density as open_density
from tomat.data.density.promolecule import Promolecule as Promolecule
from tomat.perf.profile.load import load_breakdown as profile
from tomat.predict.inference.predictor import load as load

__version__: str
__all__ = ["DensityGrid", "Promolecule", "load", "mfu", "open_density", "plan", "profile"]
