"""Transformers on the electron densities of crystals, with every cycle of a training step accounted for."""

__version__ = "0.1.0"
