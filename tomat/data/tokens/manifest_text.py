"""A manifest read from its file: what damage can have made of it is refused, or changes nothing.

A file that is older than the checksums of manifests is guarded by what it says twice: the layout and its name, the
anchors' keys and the names and seed that make them.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from tomat.base.checked_json import parse_checked, refuse_unknown_keys
from tomat.base.errors import TomatError
from tomat.base.records import typed
from tomat.data.density.rules import ReadRules
from tomat.data.tokens.clipping import check_max_clipped_share
from tomat.data.tokens.layouts import LAYOUTS
from tomat.data.tokens.manifest import IMPORTED_ANCHORS, SHARD_FORMAT_VERSION, ShardManifest, anchors_seed
from tomat.data.tokens.vocabulary import VOCABULARY_VERSION

KEYS = frozenset(field.name for field in fields(ShardManifest)) - {"has_checksum"}
LATER_KEYS = {"clipped", "max_clipped_share", "read_rules", "structures_sha256", "promolecule_sha256"}


def parse_manifest(text: str | bytes, source: str) -> ShardManifest:
    """The manifest in `ShardManifest.to_text`'s JSON."""
    again = "Copy or tokenize the set again."
    content, checked = parse_checked(text, source, "a manifest of a shard set", again)
    if missing := sorted(KEYS - LATER_KEYS - content.keys()):
        raise TomatError(f"{source} is not a manifest of a shard set: it has no '{missing[0]}'. {again}")
    version = content["format_version"], content["vocabulary_version"]
    if version != (SHARD_FORMAT_VERSION, VOCABULARY_VERSION):
        raise TomatError(
            f"{source} has format version {version[0]} and vocabulary version {version[1]}; this tomat reads "
            f"{SHARD_FORMAT_VERSION} and {VOCABULARY_VERSION}. Tokenize the set again, or use the tomat that wrote "
            "it."
        )
    if not checked:
        refuse_unknown_keys(content, KEYS | {"context", "checksum"}, source, again)
    values = {key: content[key] for key in KEYS if key in content}
    try:
        manifest = replace(typed(values, ShardManifest, source, again, extra_keys=False), has_checksum=checked)
        _check_derived(manifest, content)
    except TomatError as error:
        # What the manifest itself refuses does not know its file.
        raise error if str(error).startswith(source) else TomatError(f"{source}: {error} {again}") from error
    return manifest


def _check_derived(manifest: ShardManifest, content: Mapping[str, Any]) -> None:
    """Refuse what a manifest says twice and not alike: the only guard of one without a checksum."""
    if manifest.max_clipped_share is not None:
        check_max_clipped_share(manifest.max_clipped_share)
    rules = manifest.read_rules
    if rules is not None:
        if set(rules) != {"species", "accept"}:
            raise TomatError(f"The manifest is damaged: its read_rules are {rules!r:.80}.")
        ReadRules(rules["species"], rules["accept"])  # refuses unknown names
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
