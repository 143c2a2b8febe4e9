"""A run on a folder of densities: makes or finds its data and sets what in its configuration depends on them."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tomat.base.errors import TomatError
from tomat.base.layout import CONFIG_FILE
from tomat.base.progress import progress
from tomat.base.reporting import write_text

if TYPE_CHECKING:
    from tomat.data.dataset.folder import FolderData
    from tomat.model.nearby_atoms import AtomsRead, Room
    from tomat.train.settings.config import TrainConfig

ROOM_FILE = "room.json"
"""File beside the shard sets with the largest numbers of atoms and elements near a patch."""


def folder_words(config_path: Path, overrides: Sequence[str]) -> list[str]:
    """The words of a command line. If they turn the configuration to a folder of densities, a missing run name is set
    to the folder's name, and a missing purpose is set. The name in the file belongs to a run on other data."""
    from tomat.base.overrides import parse_overrides, read_yaml

    given = parse_overrides(overrides)
    data = given.get("data") or {}
    in_file = read_yaml(config_path, "train").get("data") or {}
    if not isinstance(data, dict) or data.get("source") != "folder" or not data.get("input"):
        return list(overrides)
    if isinstance(in_file, dict) and in_file.get("source") == "folder":
        return list(overrides)
    place = str(data["input"])
    words = list(overrides)
    if "run_name" not in given:
        name = place.rstrip("/") if "://" in place else str(Path(place).resolve())
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", name.rsplit("/", 1)[-1]).strip("-._") or "folder"
        words += ["--run_name", json.dumps(name)]  # in quotes: a name can be a number
    if "purpose" not in given:
        words += ["--purpose", json.dumps(f"Trained on the densities of {place}.")]
    return words


def prepared(config: "TrainConfig") -> "tuple[TrainConfig, FolderData | None]":
    """The configuration that a run trains with, and its data if they come from a folder. The densities of a folder
    determine `data.n_density_tokens` and the room for atoms near a patch."""
    if config.data.source != "folder":
        return config, None
    from tomat.data.dataset.folder import FolderRequest, prepare_folder
    from tomat.model.any_decoder import environment_of, is_field
    from tomat.train.folder import RunFolder
    from tomat.train.runs.record import read_config

    data = config.data
    assert data.input is not None  # or `DataConfig` would have refused it
    run_dir = RunFolder.of(config).path
    recorded = run_dir / CONFIG_FILE
    if recorded.exists() and (source := (read_config(str(recorded)).get("data") or {}).get("source")) != "folder":
        begun = f"run '{config.run_name}' in {run_dir} was begun with data.source {source!r}"
        raise TomatError(f"{begun}; use another --run_name for the densities of {data.input}.")
    request = FolderRequest(
        layout=data.layout,
        patches_per_material=data.patches_per_material,
        most_bins=data.n_density_tokens,
        codec_objective=data.codec_objective,
        codec_floor=data.codec_floor,
        codec_relative=data.codec_relative,
        validation_share=data.validation_share,
        split_seed=data.split_seed,
        species=tuple(data.species),
        accept=tuple(data.accept),
    )
    found = prepare_folder(data.input, request, run_dir / "data", config.run_name)
    config = replace(config, data=replace(data, n_density_tokens=found.n_density_tokens))
    environment = environment_of(config.model)
    if environment is not None:
        room = _room(found, environment)
        of_atoms = replace(cast(Any, environment), max_atoms=room.atoms, max_elements=room.elements)
        model: Any = config.model
        config = replace(config, model=of_atoms if is_field(model) else replace(model, environment=of_atoms))
    return config, found


def _room(data: "FolderData", environment: "AtomsRead") -> "Room":
    """The room for atoms and elements that the patches (or scattered voxels) of all rows need, kept in `ROOM_FILE`."""
    import numpy as np

    from tomat.data.tokens.shards import open_shards
    from tomat.model.nearby_atoms import Room, atoms_of_cell, atoms_of_patch, near_groups, places_in_cell, spatial_order

    sets = [open_shards(str(data.folder / split)) for split in data.splits]
    key = [environment.basis.cutoff_a, *(shards.content_sha256 for shards in sets)]
    kept = data.folder / ROOM_FILE
    if kept.exists():
        try:
            content = json.loads(kept.read_text(encoding="utf-8"))
            if content["of"] == key:
                return Room(int(content["max_atoms"]), int(content["max_elements"]))
        except (ValueError, KeyError, TypeError):
            pass  # the room is counted again
    room = Room(1, 1)
    with progress() as bar:
        task = bar.add_task("Counting atoms near the voxels", total=sum(shards.rows for shards in sets))
        for shards in sets:
            for index, material in enumerate(shards.manifest.materials):
                crystal = shards.crystals[index]
                if shards.layout.is_scattered:
                    numbers, positions = atoms_of_cell(crystal, environment.basis.cutoff_a)
                    room = replace(room, elements=max(room.elements, len(np.unique(numbers))))
                    rows = material.row_end - material.row_start
                    for voxels in shards.manifest.voxels(material, 0, rows):
                        places = places_in_cell(crystal, material.grid_shape, voxels)
                        places = places[spatial_order(places)]
                        near = near_groups(positions, places, environment.basis.cutoff_a)
                        room = room.enlarged(numbers[each] for each in near)
                    bar.advance(task, rows)
                    continue
                patch_shape = shards.layout.patch_shape(len(crystal.atomic_numbers))
                anchors = np.asarray(shards.manifest.anchors(material))
                near = (
                    atoms_of_patch(crystal, anchor, material.grid_shape, patch_shape, environment.basis.cutoff_a)[0]
                    for anchor in anchors
                )
                room = room.enlarged(near)
                bar.advance(task, len(anchors))
    write_text(kept, json.dumps({"max_atoms": room.atoms, "max_elements": room.elements, "of": key}) + "\n")
    return room
