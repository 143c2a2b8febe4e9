"""Densities as ids and back: Lloyd-Max bins, two tokens a voxel, fractional coordinates."""

from tomat.codec.base import UNITS, DensityCodec, load_codec

__all__ = ["UNITS", "DensityCodec", "load_codec"]
