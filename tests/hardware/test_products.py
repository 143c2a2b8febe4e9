"""The least time of products of mixed operands, against a sum written out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tomat.hardware.chips import CHIPS
from tomat.hardware.flops import OperandTypes, Products

OPERANDS = st.sampled_from(["bf16", "int8", "fp8", "f32"])
FLOPS = st.floats(0, 1e18)


@given(
    flops=st.tuples(*[FLOPS] * 5), types=st.tuples(*[OPERANDS] * 5), chip=st.sampled_from(sorted(CHIPS)),
    count=st.integers(1, 9),
)  # fmt: skip
def test_each_product_at_the_peak_of_its_operands(flops, types, chip, count):
    products, operands, peak_of = Products(*flops), OperandTypes(*types), CHIPS[chip].peak_of
    seconds = sum(done / peak_of(kind) for done, kind in zip(flops, types, strict=True))
    assert products.least_seconds(operands, peak_of) == pytest.approx(seconds)
    assert products.times(count).least_seconds(operands, peak_of) == pytest.approx(count * seconds)
    assert sum(products.by_operand(operands).values()) == pytest.approx(products.total)
    # Of one type: FLOPs over its peak, as every table of MFU has it.
    assert products.least_seconds(OperandTypes(), peak_of) == pytest.approx(products.total / peak_of("bf16"))


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_fewer_bits_are_no_slower(chip):
    assert chip.peak_of("f32") <= chip.peak_of("bf16") <= min(chip.peak_of("int8"), chip.peak_of("fp8"))
    assert chip.peak_of("bf16") == chip.peak_bf16_flops_per_second / chip.jax_devices_per_chip
