"""A manifest read from its file: what damage can have made of it is refused, or changes nothing.

A file that is older than the checksums of manifests is guarded by what it says twice: the layout and its name, the
anchors' keys and the names and seed that make them.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tomat.base.checked_json import parse_checked, refuse_unknown_keys
from tomat.base.errors import TomatError
from tomat.data.density.rules import ReadRules
from tomat.data.tokens.clipping import ClippedMaterial, check_max_clipped_share
from tomat.data.tokens.layouts import LAYOUTS, SequenceLayout
from tomat.data.tokens.manifest import (
    IMPORTED_ANCHORS,
    SHARD_FORMAT_VERSION,
    MaterialRows,
    ShardManifest,
    SkippedMaterial,
    anchors_seed,
)
from tomat.data.tokens.vocabulary import VOCABULARY_VERSION

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "split": str,
    "layout": dict,
    "rows": int,
    "block_rows": int,
    "codec_sha256": str,
    "n_density_tokens": int,
    "unit": str,
    "patches_per_material": int,
    "seed": int,
    "materials": list,
    "skipped": list,
    "clipped": (list, type(None)),
    "max_clipped_share": (float, int, type(None)),
    "read_rules": (dict, type(None)),
    "structures_sha256": (str, type(None)),
    "promolecule_sha256": (str, type(None)),
    "chunk_checksums": list,
    "complete": bool,
    "format_version": int,
    "vocabulary_version": int,
}
"""What JSON holds for each field of a manifest."""

_LARGEST_INTEGER = 1 << 53
"""Of rows, so that NumPy takes them. A seed is only hashed, and may be any."""


def parse_manifest(text: str | bytes, source: str) -> ShardManifest:
    """The manifest in `ShardManifest.to_text`'s JSON.

    Raises:
        TomatError: if it is none, of another version, damaged, or contradicts itself; it names `source`.
    """
    again = "Copy or tokenize the set again."
    content, checked = parse_checked(text, source, "a manifest of a shard set", again)
    try:
        version = content["format_version"], content["vocabulary_version"]
    except KeyError as error:
        raise TomatError(f"{source} is not a manifest of a shard set: it has no {error}. {again}") from error
    if version != (SHARD_FORMAT_VERSION, VOCABULARY_VERSION):
        raise TomatError(
            f"{source} has format version {version[0]} and vocabulary version {version[1]}; this tomat reads "
            f"{SHARD_FORMAT_VERSION} and {VOCABULARY_VERSION}. Tokenize the set again, or use the tomat that wrote "
            "it."
        )
    if not checked:
        refuse_unknown_keys(content, frozenset(_TYPES) | {"context", "checksum"}, source, again)
    try:
        manifest = ShardManifest(**_values(content), has_checksum=checked)
        _check_derived(manifest, content)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise TomatError(f"{source} is a damaged manifest ({type(error).__name__}: {error}). {again}") from error
    except TomatError as error:
        raise TomatError(f"{source}: {error} {again}") from error
    return manifest


def _values(content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a manifest from its JSON; what older ones lack is None."""
    later = ("clipped", "max_clipped_share", "read_rules", "structures_sha256", "promolecule_sha256")
    values: dict[str, Any] = dict.fromkeys(later)
    values |= {key: content[key] for key in _TYPES if key in content}
    for key, expected in _TYPES.items():
        value = values[key]
        if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
            raise TypeError(f"{key} is {value!r:.40}")
        if isinstance(value, int) and key != "seed" and not 0 <= value <= _LARGEST_INTEGER:
            raise ValueError(f"{key} is {value!r:.40}")
    values["layout"] = SequenceLayout(**values["layout"])
    values["materials"] = tuple(_material_rows(item) for item in values["materials"])
    values["skipped"] = tuple(SkippedMaterial(**item) for item in values["skipped"])
    for entry in values["skipped"]:
        if not isinstance(entry.material_id, str) or not isinstance(entry.reason, str):
            raise TypeError(f"a skipped material is {entry!r:.80}")
    if values["max_clipped_share"] is not None:
        check_max_clipped_share(values["max_clipped_share"])
    if values["read_rules"] is not None:
        rules = values["read_rules"]
        if set(rules) != {"species", "accept"} or not all(isinstance(names, list) for names in rules.values()):
            raise ValueError(f"read_rules is {rules!r:.80}")
        values["read_rules"] = {key: tuple(names) for key, names in rules.items()}
        ReadRules(values["read_rules"]["species"], values["read_rules"]["accept"])  # refuses unknown names
    if values["clipped"] is not None:
        values["clipped"] = tuple(ClippedMaterial(**item) for item in values["clipped"])
    values["chunk_checksums"] = tuple(values["chunk_checksums"])
    beside = [values[key] for key in ("structures_sha256", "promolecule_sha256") if values[key] is not None]
    for checksum in (*values["chunk_checksums"], *beside):
        if not isinstance(checksum, str) or re.fullmatch(r"[0-9a-f]{64}", checksum) is None:
            raise ValueError(f"a checksum is {checksum!r:.80}")
    return values


def _material_rows(item: Mapping[str, Any]) -> MaterialRows:
    shape = item["grid_shape"]
    whole = [item["row_start"], item["row_end"], *shape]
    if len(shape) != 3 or not all(type(each) is int and 0 <= each <= _LARGEST_INTEGER for each in whole):
        raise ValueError(f"rows and grid of a material are {whole!r:.80}")
    if min(shape) < 1 or not isinstance(item["material_id"], str) or not isinstance(item["anchors_seed"], str):
        raise ValueError(f"a material is {item!r:.80}")
    return MaterialRows(**{**item, "grid_shape": tuple(shape)})


def _check_derived(manifest: ShardManifest, content: Mapping[str, Any]) -> None:
    """Refuse what a manifest says twice and not alike: the only guard of one without a checksum."""
    layout = manifest.layout
    if LAYOUTS.get(layout.name, layout) != layout:
        raise TomatError(
            f"The manifest is damaged: its layout is called {layout.name}, but is not the layout of that name "
            f"(found {layout.to_dict()}, expected {LAYOUTS[layout.name].to_dict()})."
        )
    known = [
        each.name for each in LAYOUTS.values() if layout.name not in LAYOUTS and replace(layout, name=each.name) == each
    ]
    if known:
        raise TomatError(
            f"The manifest is damaged: its layout is called {layout.name}, and is {known[0]} in all but its name."
        )
    if content.get("context", layout.context) != layout.context:
        raise TomatError(
            f"The manifest is damaged: it says a context of {content['context']}, its layout has {layout.context}."
        )
    for material in manifest.materials:
        expected = anchors_seed(manifest.seed, material.material_id)
        if material.anchors_seed not in (expected, IMPORTED_ANCHORS):
            raise TomatError(
                f"The manifest is damaged: the anchors of {material.material_id} have the key {material.anchors_seed}; "
                f"its name and the seed {manifest.seed} make {expected}."
            )
