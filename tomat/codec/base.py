"""What every density codec offers, and how one is kept in a file."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, Self, runtime_checkable

import numpy as np

from tomat.base.checked_json import parse_checked, refuse_unknown_keys, with_checksum
from tomat.base.errors import TomatError

UNIT_E_PER_A3 = "e_per_A3"
UNIT_RHO_TIMES_VOLUME = "rho_times_volume"
UNITS = (UNIT_E_PER_A3, UNIT_RHO_TIMES_VOLUME)
"""Electrons per cubic angstrom; or density times cell volume, as CHGCAR and the first generation of tokens keep it."""

CODEC_FORMAT_VERSION = 1

Decoder = Literal["median", "mean"]
DECODERS: tuple[Decoder, ...] = ("median", "mean")


@runtime_checkable
class DensityCodec(Protocol):
    """Turns densities into ids 0 to n_density_tokens - 1, and ids into densities."""

    @property
    def n_density_tokens(self) -> int:
        """Number of ids."""
        ...

    @property
    def tokens_per_voxel(self) -> int:
        """Ids a voxel: 1 or 2."""
        ...

    @property
    def unit(self) -> str:
        """Unit of the densities, one of `UNITS`."""
        ...

    @property
    def fitted_range(self) -> tuple[float, float]:
        """Smallest density above zero, and largest, that ids stand for, in `unit`. What lies outside, zero apart, takes
        the first or the last id; a smallest of 0 says that it is not known."""
        ...

    @property
    def sha256(self) -> str:
        """Hash of all that decides which id a density gets and which density an id gets."""
        ...

    def encode(self, rho: np.ndarray) -> np.ndarray:
        """float32 [...] to uint16 [...] for one token a voxel, [..., tokens_per_voxel] for more."""
        ...

    def decode(self, ids: np.ndarray, decoder: Decoder = "median") -> np.ndarray:
        """The ids of `encode` to float32 [...]."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` needs, JSON-ready."""
        ...

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """The codec that `to_dict` described."""
        ...

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the codec to a JSON file that is the same, byte for byte, for the same codec."""
        ...


def check_unit(unit: str, source: str) -> None:
    """Refuse a unit that is none of `UNITS`.

    Raises:
        TomatError: naming `source`, the unit and the known ones.
    """
    if unit not in UNITS:
        raise TomatError(f"{source} has the unit {unit!r}; expected one of {', '.join(UNITS)}.")


def require_unit(codec: DensityCodec, unit: str, source: str) -> None:
    """Refuse to read densities of one unit as the other.

    Raises:
        TomatError: if the codec's unit is not `unit`.
    """
    if codec.unit != unit:
        raise TomatError(
            f"The codec was fitted to densities in {codec.unit}, but {source} is in {unit}. Use a codec of that unit, "
            "or convert the densities (multiply or divide by the cell volume) first."
        )


def content_sha256(fields: Mapping[str, str | int | float], tables: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over the fields as sorted JSON and the tables as little-endian float32, in order of name."""
    digest = hashlib.sha256(json.dumps(dict(fields), sort_keys=True).encode())
    for name in sorted(tables):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(tables[name], dtype="<f4").tobytes())
    return digest.hexdigest()


def float32_list(table: np.ndarray) -> list[float]:
    """Each float32 as the shortest decimal that reads back as the same float32: half the text of its float64 digits."""
    return [float(text) for text in np.asarray(table, dtype=np.float32).astype(str)]


def codec_text(codec: DensityCodec) -> str:
    """The codec as JSON text, the same for the same codec, one table a line."""
    content = with_checksum(codec.to_dict())
    lines = [f'  "{key}": {json.dumps(content[key], sort_keys=True)}' for key in sorted(content)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write_codec(codec: DensityCodec, path: str | os.PathLike[str]) -> None:
    """Write `codec_text` to `path` in one step: a reader sees the old codec or the new, never a part."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(codec_text(codec), encoding="utf-8")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def codec_from_text(text: str, source: str) -> DensityCodec:
    """The codec in `codec_text`'s JSON.

    Raises:
        TomatError: if the text is no codec, of an unknown kind or version, or its hashes do not fit its content.
    """
    from tomat.codec.lloyd_max import LloydMaxCodec
    from tomat.codec.two_token import TwoTokenCodec

    again = "Fit the codec again with `tomat codec fit`, or copy it again from where it came from."
    content, checked = parse_checked(text, source, "a codec", again)
    kinds = {LloydMaxCodec.kind: LloydMaxCodec, TwoTokenCodec.kind: TwoTokenCodec}
    kind = content.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise TomatError(f"{source} is not a codec: its kind is {kind!r}, expected one of {', '.join(kinds)}. {again}")
    version = content.get("format_version")
    if version != CODEC_FORMAT_VERSION:
        raise TomatError(
            f"{source} has codec format version {version!r}; this tomat reads {CODEC_FORMAT_VERSION}. {again}"
        )
    if not checked:
        refuse_unknown_keys(content, kinds[kind].keys, source, again)
    try:
        # A number beyond float32 is refused by the codec's own checks, which say more than NumPy's warning.
        with np.errstate(over="ignore", invalid="ignore"):
            codec = kinds[kind].from_dict(content)
        expected = content["sha256"]
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise TomatError(f"{source} is a damaged codec: {type(error).__name__}: {error}. {again}") from error
    except TomatError as error:
        raise TomatError(f"{source} is a damaged codec: {error} {again}") from error
    if codec.sha256 != expected:
        raise TomatError(
            f"{source} is a damaged codec: its tables hash to {codec.sha256[:12]}..., the file says "
            f"{str(expected)[:12]}... {again}"
        )
    return codec


def load_codec(path: str | os.PathLike[str]) -> DensityCodec:
    """The codec in the JSON file `path`.

    Raises:
        TomatError: if the file cannot be read, or is no whole codec of this version.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TomatError(
            f"Cannot read the codec {path}: {reason}. Make one with `tomat codec fit --output FILE`."
        ) from error
    return codec_from_text(text, str(path))
