"""Every file of a shard set and of its making, damaged.

Files with a checksum give what was written or one TomatError: a difference is never silent. Files without one (a YAML
configuration, manifests and codecs of before they had checksums) give something whole or one TomatError.
None raises anything else, takes long, or far more memory than its file.
"""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fitted_codec import fitted_codec
from fuzz_damage import BYTE_DAMAGE, damaged_bytes, damaged_file, damaged_texts, fuzz
from hypothesis import strategies as st
from relative_codec import relative_codec
from smooth_grid import smooth_grid

from tomat.base.documents import CHECKSUM_KEY, with_checksum
from tomat.base.storage import Store
from tomat.data.codec.files import codec_from_text, codec_text
from tomat.data.codec.histogram import DensityHistogram
from tomat.data.codec.two_token import TwoTokenCodec
from tomat.data.density.grid import DensityGrid
from tomat.data.density.promolecule import Promolecule, RadialBasis
from tomat.data.tokens.clipping import ClippedMaterial
from tomat.data.tokens.layouts import LAYOUTS, SequenceLayout
from tomat.data.tokens.manifest import ShardManifest, SkippedMaterial, parse_manifest
from tomat.data.tokens.pipeline.config import ShardJob, load_retokenize_config
from tomat.data.tokens.pipeline.driver import request_content, write_shards
from tomat.data.tokens.pipeline.sources import Material
from tomat.data.tokens.pipeline.stages import Surveyed, SurveyUnit, UnitSurvey, unit_survey
from tomat.data.tokens.shards import open_shards
from tomat.data.tokens.writer import checksum_of_record, record_content


def check(
    whole: Any, read: Callable[[Any], Any], inputs: st.SearchStrategy[Any], count: int,
    same: Callable[[Any], bool],
) -> None:  # fmt: skip
    """Every input is refused, or `same` holds for what it gives."""

    def judged(content: Any) -> None:
        assert same(read(content))

    fuzz(whole, inputs, judged, count)


PROMOLECULE = Promolecule(RadialBasis(4, 3.0), {14: np.arange(4.0)}, 1)
NAMES = ["mp-0", "mp-1"]


def density(name: str) -> DensityGrid:
    return smooth_grid((6, 7, 8), 2, ord(name[-1]), name)


@pytest.fixture(scope="module")
def codec():
    return fitted_codec(40, np.geomspace(1e-3, 100, 3000))


@pytest.fixture(scope="module")
def manifest(codec) -> ShardManifest:
    settings = {"layout": LAYOUTS["v3-p7"], "patches_per_material": 10, "seed": 3, "split": "train", "block_rows": 8}
    plan = ShardJob(output="", codec=None, **settings).plan(
        [("mp-1", (40, 44, 48)), ("mp-2", (50, 50, 50)), ("mp-3", (41, 42, 43))],
        codec,
        skipped=[SkippedMaterial("mp-9", "too large")],
        clipped=[ClippedMaterial("mp-2", 3, 1, 2.5e-5)],
    )
    return dataclasses.replace(plan, chunk_checksums=tuple(f"{k:064x}" for k in range(4)), complete=True)


def without(text: str, *keys: str) -> str:
    return json.dumps({key: value for key, value in json.loads(text).items() if key not in keys})


def read_manifest(content: bytes) -> ShardManifest:
    return parse_manifest(content, "manifest.json")


def test_manifest(manifest):
    text = manifest.to_text()
    check(text.encode(), read_manifest, damaged_texts(json.loads(text)), 400, lambda found: found == manifest)


def test_manifest_of_before_there_was_a_checksum(manifest):
    def whole(found: ShardManifest) -> bool:
        found.chunk_rows(0)
        # Wherever the rows lie, the names, seeds and layouts that make their tokens are not another set's.
        anchors = [(each.material_id, each.anchors_seed) for each in found.materials]
        expected = [(each.material_id, each.anchors_seed) for each in manifest.materials]
        imported = [(name, "imported") for name, _ in expected]
        assert all(pair in (*expected, *imported) for pair in anchors) and found.layout == manifest.layout
        return parse_manifest(found.to_text(), "again") == found

    old = without(manifest.to_text(), CHECKSUM_KEY, "clipped", "max_clipped_share")
    check(old.encode(), read_manifest, damaged_texts(json.loads(old)), 300, whole)


@pytest.mark.parametrize("kind", ["lloyd_max", "two_token", "relative"])
def test_codec(codec, kind):
    whole = {"lloyd_max": codec, "two_token": TwoTokenCodec(), "relative": relative_codec(16)}[kind]
    text = codec_text(whole)
    old = without(text, CHECKSUM_KEY, "fitted_min")

    def parse(content: bytes) -> Any:
        return codec_from_text(content.decode(errors="replace"), "codec.json")

    check(text.encode(), parse, damaged_texts(json.loads(text)), 200, lambda found: codec_text(found) == text)
    check(old.encode(), parse, damaged_texts(json.loads(old)), 150, lambda found: found.sha256 == whole.sha256)


def test_layout_configuration(tmp_path):
    text = Path("configs/tokenize/v3-p19.yaml").read_text() + "valences: {Si: 4, O: 6}\nmax_skipped: 0.02\n"
    path = tmp_path / "layout.yaml"

    def parse(content: bytes) -> Any:
        path.write_bytes(content)
        return load_retokenize_config(path, ["--input", "in", "--output", "out"])

    def plausible(found: Any) -> bool:
        numbers = [found.max_skipped, found.electron_tolerance, found.max_clipped_share, *found.valences.values()]
        return all(math.isfinite(each) and each >= 0 for each in numbers) and found.layout in LAYOUTS

    check(text.encode(), parse, damaged_file(text.encode()), 60, plausible)
    keys = {"layout": "v3-p19", "patches_per_material": 64, "valences": {"Si": 4}, "max_skipped": 0.01, "bins": 512}
    keys |= {"electron_tolerance": 0.005, "max_clipped_share": 0.001, "seed": 0, "split": "train", "block_rows": 64}
    # JSON is YAML, and has every odd value.
    check(text.encode(), parse, damaged_texts(keys), 120, plausible)


def test_survey(tmp_path):
    unit = SurveyUnit(0, tuple(Material(f"mp-{k}", f"in/mp-{k}.zarr") for k in range(3)))
    outside = ClippedMaterial("mp-1", 3, 1, 2.5e-5)
    surveyed = tuple(Surveyed(f"mp-{k}", (40, 41, 42 + k), 2, 8.0, 17, outside if k else None) for k in range(2))
    whole = UnitSurvey(surveyed, (("mp-2", "does not decode"),))
    content, store = json.dumps(with_checksum(dataclasses.asdict(whole))).encode(), Store(tmp_path)

    def parse(damaged: bytes) -> UnitSurvey:
        store.write(unit.part("json"), damaged)
        return unit_survey(store, unit)

    check(content, parse, damaged_texts(json.loads(content)), 250, lambda found: found == whole)


def test_histogram():
    whole = DensityHistogram(unit="rho_times_volume")
    whole.add(np.random.default_rng(0).gamma(0.3, 2.0, 300).astype(np.float32), "mp-1")
    whole.add(np.zeros(3, np.float32))
    content = whole.to_bytes()

    def parse(damaged: bytes) -> DensityHistogram:
        return DensityHistogram.from_bytes(damaged, "histogram.npz", "Count again.")

    def same(found: DensityHistogram) -> bool:
        tables = np.array_equal(found.counts, whole.counts) and np.array_equal(found.sums, whole.sums)
        rest = (found.unit, found.n_zero, found.max_density, found.material_ids)
        return tables and rest == (whole.unit, whole.n_zero, whole.max_density, whole.material_ids)

    check(content, parse, damaged_file(content), 250, same)


def test_request():
    whole = {"identity": {"layout": {"name": "v3-p7", "context": 512}, "seed": 0}, "source": {"input": "in"}}

    def parse(content: bytes) -> dict | None:
        found = request_content(content, "request.json", "Remove it.")
        # Without its checksum it is a request of before, whatever it asks for: it is compared with the set it is for.
        return found if CHECKSUM_KEY.encode() in content else None

    text = json.dumps(with_checksum(whole))
    check(text.encode(), parse, damaged_texts(json.loads(text)), 150, lambda found: found in (None, whole))


def test_record_of_a_chunk():
    checksum = f"{12345:064x}"
    whole = record_content(checksum)

    def parse(damaged: bytes) -> str:
        return checksum_of_record(damaged, "progress/00000000")

    # One damage: cut after its checksum a record is one of before there was a CRC32, which guards nothing further.
    once = BYTE_DAMAGE.map(lambda steps: damaged_bytes(whole, steps[:1]))
    check(whole, parse, once, 150, lambda found: found == checksum)


@pytest.fixture(scope="module")
def shard_set(tmp_path_factory, codec) -> tuple[Path, np.ndarray]:
    place = tmp_path_factory.mktemp("fuzz") / "set"
    layout = SequenceLayout("small", "v3", 4, 160)
    settings = {"layout": layout, "patches_per_material": 8, "seed": 0, "block_rows": 8, "promolecule": PROMOLECULE}
    write_shards(place, NAMES, density, codec=codec, **settings)
    return place, open_shards(place).read_rows(0, 16)


@pytest.mark.parametrize(
    "name",
    ["tokens.zarr/c/1/0", "tokens.zarr/zarr.json", "manifest.json", "codec.json", "structures.npz", "promolecule.json"],
)
def test_objects_of_a_set(shard_set, tmp_path, name):
    place, rows = shard_set
    copied = tmp_path / "set"
    shutil.copytree(place, copied)
    content = (copied / name).read_bytes()

    def parse(damaged: bytes) -> np.ndarray:
        (copied / name).write_bytes(damaged)
        shards = open_shards(copied)
        assert shards.promolecule is not None and shards.promolecule.to_text() == PROMOLECULE.to_text()
        for crystal, material in zip(shards.crystals, NAMES, strict=True):
            assert np.array_equal(crystal.frac_coords, density(material).frac_coords)
        return np.concatenate([shards.read_block(block, verify=True).result() for block in range(shards.n_blocks)])

    inputs = (
        damaged_file(content) | damaged_texts(json.loads(content)) if name.endswith("json") else damaged_file(content)
    )
    check(content, parse, inputs, 70, lambda found: np.array_equal(found, rows))
