"""Densities as ids and back: Lloyd-Max bins, two tokens a voxel, fractional coordinates."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tomat.codec.base import UNITS, DensityCodec, load_codec

__all__ = ["UNITS", "DensityCodec", "load_codec"]


def __getattr__(name: str) -> Any:
    """What this room exports, on first use: `tomat --help` imports its commands, and NumPy would double that time."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tomat.codec import base

    return getattr(base, name)
