"""The bytes of shard sets of the embedded densities are those of before there was one driver."""

import hashlib
import json

import numpy as np
import pytest

from tomat.data.codec.files import write_codec
from tomat.data.density.demo.embedded import demo_materials, load_demo
from tomat.data.density.promolecule import Promolecule, RadialBasis
from tomat.data.tokens.layouts import layout_named
from tomat.data.tokens.pipeline.config import RetokenizeConfig
from tomat.data.tokens.pipeline.driver import retokenize, write_shards
from tomat.data.tokens.pipeline.runners import PoolRunner
from tomat.data.tokens.shards import open_shards

MATERIALS = [material.material_id for material in demo_materials("validation")]

DIGESTS = {
    "v3-p7": ("df53526b61d02c07", "185a04094ed0cb8a"),
    "v3-fill8k": ("b1df96421fc54e69", "cb58d6d95a021d18"),
}
"""By layout: of the ids, and of what the manifest says."""


def digests(place):
    """Of the array of ids; and of the manifest's own hash fields, codec, structures and chunks."""
    shards = open_shards(place)
    manifest = json.loads((place / "manifest.json").read_text())
    fields = {key: manifest[key] for key in ("codec_sha256", "structures_sha256", "chunk_checksums", "materials")}
    ids = shards.read_rows(0, shards.rows).astype("<u2").tobytes()
    return tuple(hashlib.sha256(each).hexdigest()[:16] for each in (ids, json.dumps(fields, sort_keys=True).encode()))


@pytest.mark.parametrize("layout", DIGESTS)
def test_ids_and_manifest_are_those_of_before(tmp_path, codec, layout):
    """By both ways to write a set; a promolecule lies beside the rows and decides none."""
    write_codec(codec, tmp_path / "codec.json")
    promolecule = Promolecule(RadialBasis(4, 3.0), {14: np.arange(4.0)}, 1)
    (tmp_path / "promolecule.json").write_text(promolecule.to_text())
    settings = {"patches_per_material": 2, "seed": 0, "split": "validation"}
    write_shards(tmp_path / "one", MATERIALS, load_demo, layout=layout_named(layout), codec=codec, **settings)
    config = RetokenizeConfig(
        source="embedded",
        output=str(tmp_path / "two"),
        layout=layout,
        codec=str(tmp_path / "codec.json"),
        promolecule=str(tmp_path / "promolecule.json"),
        **settings,
    )
    retokenize(config, PoolRunner(1))
    assert digests(tmp_path / "one") == digests(tmp_path / "two") == DIGESTS[layout]
    assert open_shards(tmp_path / "two").manifest.promolecule_sha256 == promolecule.sha256
