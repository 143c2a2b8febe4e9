"""Settings of re-tokenizing that no set can have, and those that ship."""

from pathlib import Path

import pytest

from tomat.base.errors import TomatError
from tomat.data.tokens.pipeline.config import load_retokenize_config

PLACES = ["--input", "in", "--output", "out"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output", "out"], "every other source needs one"),
        (["--input", "in"], "There is no output"),
        ([*PLACES, "--layout", "v9"], "There is no layout 'v9'"),
        ([*PLACES, "--patches", "3"], "fields `patches` are not valid"),
        ([*PLACES, "--seed", "x"], "cannot be read"),
        ([*PLACES, "--split_file", "s.json"], "split_file is set, but filelist"),
        ([*PLACES, "--species", "[Na]"], "source 'rho_gga' names its elements"),
        (["--source", "embedded", "--output", "out", "--accept", "[zeros]"], "the embedded densities need none"),
        *(([*PLACES, "--valences", text], "valences") for text in ("{Si: .nan}", "{Si: -4}", "{Si: true}", "{Xx: 4}")),
        *(([*PLACES, "--max_skipped", text], "max_skipped") for text in (".nan", "-0.1", "1.5")),
        *(([*PLACES, "--electron_tolerance", text], "electron_tolerance") for text in (".nan", "0", "1.5")),
        *(([*PLACES, "--max_clipped_share", text], "max_clipped_share") for text in (".nan", "-0.1", "1.5")),
        ([*PLACES, "--valences", "{Si: 400}"], "valences says 400"),
    ],
)
def test_settings_that_cannot_be(words, message):
    with pytest.raises(TomatError, match=message):
        load_retokenize_config(None, words)


NAMES = ["v3-p19", "v3-p20", "v3-fill8k", "v3-p15", "v3-p12", "v3-p11", "v2-p14", "field-scattered-8192"]


@pytest.mark.parametrize("name", NAMES)
def test_shipped_configurations_say_what_their_layout_is(name):
    path = Path(f"configs/tokenize/{name}.yaml")
    words = [*PLACES, "--valences", "{Si: 4, H: 1.75, Fe: 14}", "--max_skipped", "3"]
    config = load_retokenize_config(path, words)
    layout = config.sequence_layout
    named = name.removeprefix("field-")
    assert (config.layout, config.filelist, config.patches_per_material) == (named, "mp_filelist.txt", 64)
    text = path.read_text(encoding="utf-8")
    assert f"{layout.n_voxels:,} voxels" in text and f"context of {layout.context:,}" in text
    for atoms in (2, 12, 88):
        assert f"{100 * layout.padding_share(atoms):.1f} % at {atoms} atoms" in text
