"""What kernels take of a chip's VMEM, against what libtpu 0.0.46 says of each, compiled alone for that chip."""

import json
from pathlib import Path

import pytest

from tomat.base.errors import TomatError
from tomat.model.tiles import QkRotaryConfig, WholeHeadConfig
from tomat.model.vmem import VMEM_BYTES, check_rotary, head_tiles, most_head_vmem

COMPILED = json.loads(Path(__file__).with_name("vmem_by_chip.json").read_text(encoding="utf-8"))


def refused(row: dict) -> bool:
    """Whether tomat refuses what the row compiled."""
    try:
        if row["kernel"] == "whole_head":
            shape = row["positions"], row["head_size"], row["itemsize"]
            head_tiles(WholeHeadConfig(*row["sizes"]), *shape, rotate=row["rotate"], device_kind=row["device_kind"])
        else:
            config = QkRotaryConfig("pallas", row["block_positions"])
            check_rotary(config, row["block_positions"], row["head_size"], row["itemsize"], row["device_kind"])
    except TomatError:
        return True
    return False


def test_nothing_that_the_compiler_refuses_is_let_through():
    assert {row["device_kind"] for row in COMPILED["rows"]} == VMEM_BYTES.keys()
    assert not [row for row in COMPILED["rows"] if not row["compiles"] and not refused(row)]


def test_little_that_the_compiler_takes_is_refused():
    """Of kernels that hold a head, those within the share that is left to the compiler."""
    taken = [row for row in COMPILED["rows"] if row["compiles"]]
    wrong = [row for row in taken if refused(row)]
    assert len(wrong) <= 0.1 * len(taken), wrong


@pytest.mark.parametrize("device_kind", ["TPU v5", "TPU7x"])
def test_a_refusal_says_what_fits_on_the_chip(device_kind):
    assert head_tiles(WholeHeadConfig(), 8192, 256, 2).vmem_bytes <= most_head_vmem(None)
    said = rf"MiB of VMEM for 8192 positions and heads of 256 .* {device_kind} has 64 for it\. heads of 128 or 4,\d+ "
    with pytest.raises(TomatError, match=said):
        head_tiles(WholeHeadConfig(), 8192, 256, 2, device_kind=device_kind)
    with pytest.raises(TomatError, match="Set model.qk_rotary.block_positions: [0-9]+, or model.qk_rotary.kernel: xla"):
        check_rotary(QkRotaryConfig("pallas"), 8192, 4096, 2, device_kind)


def test_a_recipe_is_refused_for_a_slice_whose_chips_cannot_hold_its_heads():
    from tomat.train.settings.config import load_config

    load_config("200m-v6e16-fast")
    with pytest.raises(TomatError, match="TPU v5 has 64 for it"):
        load_config("200m-v6e16-fast", ["--slice", "v5p-16"])
    load_config("200m-v6e16-fast", ["--slice", "v5p-16", "--run_elsewhere", "true"])
