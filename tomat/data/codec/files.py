"""A codec in a JSON file: written in one step, read whole or refused."""

import json
import os
from typing import Any

import numpy as np

from tomat.base.documents import parse_checked, read_bytes, refuse_unknown_keys, with_checksum
from tomat.base.errors import TomatError
from tomat.base.reporting import write_text
from tomat.data.codec.base import CODEC_FORMAT_VERSION, DensityCodec
from tomat.data.codec.lloyd_max import LloydMaxCodec


def codec_text(codec: DensityCodec) -> str:
    """The codec as JSON text, the same for the same codec, one table a line."""
    content = with_checksum(codec.to_dict())
    lines = [f'  "{key}": {json.dumps(content[key], sort_keys=True)}' for key in sorted(content)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write_codec(codec: DensityCodec, path: str | os.PathLike[str]) -> None:
    write_text(path, codec_text(codec))


def codec_from_text(text: str | bytes, source: str) -> DensityCodec:
    again = "Fit the codec again with `tomat codec fit`, or copy it again from where it came from."
    content, checked = parse_checked(text, source, "a codec", again)
    kinds: dict[str, type[Any]] = {LloydMaxCodec.kind: LloydMaxCodec}
    kind, version = content.get("kind"), content.get("format_version")
    if kind != LloydMaxCodec.kind:
        from tomat.data.codec.relative import RelativeCodec
        from tomat.data.codec.two_token import TwoTokenCodec

        kinds |= {TwoTokenCodec.kind: TwoTokenCodec, RelativeCodec.kind: RelativeCodec}
    if not isinstance(kind, str) or kind not in kinds:
        raise TomatError(f"{source} is not a codec: its kind is {kind!r}, expected one of {', '.join(kinds)}. {again}")
    if version != CODEC_FORMAT_VERSION:
        raise TomatError(f"{source} has codec format version {version!r}; expected {CODEC_FORMAT_VERSION}. {again}")
    try:
        # A number beyond float32 is refused by the codec's own checks, which say more than NumPy's warning.
        with np.errstate(over="ignore", invalid="ignore"):
            codec = kinds[kind].from_dict(content)
        stated = content["sha256"]
    except (TomatError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        said = error if isinstance(error, TomatError) else f"{type(error).__name__}: {error}."
        raise TomatError(f"{source} is a damaged codec: {said} {again}") from error
    if codec.sha256 != stated:
        found = f"its tables hash to {codec.sha256[:12]}..., the file says {str(stated)[:12]}..."
        raise TomatError(f"{source} is a damaged codec: {found} {again}")
    if not checked:
        refuse_unknown_keys(content, frozenset(codec.to_dict()), source, again)
    return codec


def load_codec(path: str | os.PathLike[str]) -> DensityCodec:
    return codec_from_text(read_bytes(path, "Make one with `tomat codec fit`."), str(path))
