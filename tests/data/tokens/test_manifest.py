import dataclasses
import hashlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.base.documents import CHECKSUM_KEY, with_checksum
from tomat.base.errors import TomatError
from tomat.data.tokens.layouts import LAYOUTS
from tomat.data.tokens.manifest import SkippedMaterial, anchors_seed, check_material_id, draw_anchors, parse_manifest
from tomat.data.tokens.pipeline.config import ShardJob


@pytest.fixture(scope="module")
def plan(codec):
    materials = [("mp-1", (4, 5, 6)), ("mp-2", (40, 40, 40)), ("mp-3", (7, 7, 7))]
    skipped = [SkippedMaterial("mp-9", "too large")]
    settings = {"layout": LAYOUTS["v3-p7"], "patches_per_material": 10, "seed": 3, "split": "train", "block_rows": 8}
    job = ShardJob(output="", codec=None, max_clipped_share=None, **settings)
    return job.plan(materials, codec, skipped=skipped)


@settings(max_examples=60, deadline=None)
@given(st.tuples(*[st.integers(1, 30)] * 3), st.integers(1, 300), st.integers(0, 10**9))
def test_anchors_are_in_the_cell_and_differ_while_they_can(shape, count, seed):
    anchors = draw_anchors(anchors_seed(seed, "mp-1"), shape, count)
    assert anchors.shape == (count, 3) and anchors.dtype == np.int64
    assert np.all((anchors >= 0) & (anchors < shape))
    n_voxels = int(np.prod(shape))
    _, uses = np.unique(anchors, axis=0, return_counts=True)
    # No voxel is used once more before all have been used as often.
    assert len(uses) == min(count, n_voxels) and uses.max() - (0 if count < n_voxels else uses.min()) <= 1


def test_anchors_are_fixed_for_ever():
    """Computed from the definition of Philox4x64-10, not from this code: a data set must not change with NumPy."""
    key = anchors_seed(0, "mp-149")
    raw = np.random.Philox(key=int(key, 16)).random_raw(5)
    expected = [(int(value) >> 11) * 100**3 >> 53 for value in raw]
    anchors = draw_anchors(key, (100, 100, 100), 5)
    assert (anchors @ [10_000, 100, 1]).tolist() == expected
    assert key == hashlib.sha256(b"0:mp-149").hexdigest()[:32] != anchors_seed(1, "mp-149")


@pytest.mark.parametrize("name", ["../evil", "/tmp/tomat-evil", "..", "gs://bucket/evil", "a\\b", "", "a\x00b"])
def test_no_name_leads_a_writer_outside_its_folder(name):
    with pytest.raises(TomatError, match="expected a name of printable characters"):
        check_material_id(name)


def test_rows_are_laid_out_material_by_material(plan):
    assert [(m.material_id, m.row_start, m.row_end) for m in plan.materials] == [
        ("mp-1", 0, 10),
        ("mp-2", 10, 20),
        ("mp-3", 20, 30),
    ]
    assert (plan.rows, plan.n_chunks, plan.complete) == (30, 4, False)
    assert [plan.chunk_rows(chunk) for chunk in range(4)] == [(0, 8), (8, 16), (16, 24), (24, 30)]
    np.testing.assert_array_equal(plan.material_indices(np.array([[0, 9], [10, 29]])), [[0, 0], [1, 2]])
    with pytest.raises(TomatError, match="has 0 to 29"):
        plan.material_indices(np.array([30]))


def test_text_round_trip(plan):
    text = plan.to_text()
    back = parse_manifest(text, "here")
    assert back == plan and back.to_text() == text
    assert json.loads(text)["skipped"] == [{"material_id": "mp-9", "reason": "too large"}]
    assert parse_manifest(json.dumps(json.loads(text)), "here") == plan  # laid out in another way


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format_version=2), "format version 2"),
        (lambda c: c.update(rows=31), "says 31 rows, its materials have 30"),
        (lambda c: c.update(complete=True), "0 checksums for 4 chunks"),
        (lambda c: c["layout"].update(patch_size=6), "layout v3-p7 is .*6.*expected .*7"),
        (lambda c: c["layout"].update(name="mine"), "called mine, and is v3-p7 in all but its name"),
        (lambda c: c.update(context=511), "says a context of 511, its layout has 512"),
        (lambda c: c["materials"][1].update(material_id="mp-4"), "anchors of mp-4 have the key .* make "),
        (lambda c: c["materials"][1].update(material_id="../mp-2"), "called '../mp-2'; expected a name"),
        (lambda c: c.update(block_rows=-8), "here is damaged: block_rows is -8"),
        (lambda c: c.update(max_clipped_share=float("nan")), "here is damaged: max_clipped_share is nan"),
    ],
)
def test_manifest_that_contradicts_itself_is_refused(plan, change, message):
    content = json.loads(plan.to_text())
    change(content)
    # With a checksum that fits, and as a manifest of before there was one.
    with pytest.raises(TomatError, match=message):
        parse_manifest(json.dumps(with_checksum(content)), "here")
    del content[CHECKSUM_KEY]
    with pytest.raises(TomatError, match=message):
        parse_manifest(json.dumps(content), "here")


def test_manifest_of_before_there_was_a_checksum_is_read_and_says_so(plan):
    content = json.loads(plan.to_text())
    for key in (CHECKSUM_KEY, "clipped", "max_clipped_share"):
        del content[key]
    found = parse_manifest(json.dumps(content), "here")
    assert found == plan and not found.has_checksum and plan.has_checksum
    # Written again it has one, and one that lost a known key's name has not become such a manifest.
    assert parse_manifest(found.to_text(), "here").has_checksum
    content = json.loads(plan.to_text())
    content["content_sha25v"] = content.pop(CHECKSUM_KEY)
    with pytest.raises(TomatError, match="no checksum, and an unknown key 'content_sha25v'"):
        parse_manifest(json.dumps(content), "here")


def test_the_same_material_twice_and_no_rows_cannot_be_planned(codec):
    job = ShardJob(output="", layout=LAYOUTS["v3-p7"], codec=codec, seed=0, patches_per_material=1)
    with pytest.raises(TomatError, match="mp-1 is named twice"):
        job.plan([("mp-1", (4, 4, 4))] * 2, codec)
    for wrong in ({"patches_per_material": 0}, {"max_clipped_share": 2}):
        with pytest.raises(TomatError, match="is [02]; expected"):
            dataclasses.replace(job, **wrong)


def test_read_rules_are_kept_and_damaged_ones_refused(plan):
    ruled = dataclasses.replace(plan, read_rules={"species": ("Mg", "O"), "accept": ()})
    assert parse_manifest(ruled.to_text(), "manifest.json") == ruled
    assert ruled.identity() == plan.identity() | {"species": ["Mg", "O"], "accept": []}
    for bad in ([], {"species": ["Mg"]}, {"species": "Mg", "accept": []}, {"species": ["Xx"], "accept": []}):
        content = json.loads(ruled.to_text()) | {"read_rules": bad}
        del content[CHECKSUM_KEY]
        with pytest.raises(TomatError, match="manifest.json"):
            parse_manifest(json.dumps(content), "manifest.json")
