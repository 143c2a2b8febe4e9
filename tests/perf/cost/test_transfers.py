"""Copies between HBM and the core, as the bundles of an op start them."""

from pathlib import Path

import pytest

from tomat.perf.cost.llo import Transfer, TransferReader, read_schedules
from tomat.perf.cost.scalar_code import UNBOUNDED, ScalarCode

DUMP = Path(__file__).parent / "data" / "llo"
GRID = (4, 3, 5)

# Written as libtpu 0.0.46 writes them: a counter of buffers that advances where index 0 or 1 of the grid changes.
CODE = """\
 %s1_s1 = sphi %s0_s0, %s2_s2 /* iteration index, stage = 0 iter bound = 0 */
 %s3_s3 = sphi %s0_s0, %s4_s4 /* iteration index, stage = 0 iter bound = 1 */
 %s5_s5 = sphi %s0_s0, %s6_s6 /* iteration index, stage = 0 iter bound = 2 */
 %s0_s0 = smov 0
 %s7_s7 = ssub.s32 %s1_s1, %s3_s3
 %p1_p1 = scmp.eq.s32.totalorder %s7_s7, 0
 %s8_s8 = scalar_select /*predicate=*/%p1_p1, /*on_true=*/%s9_s9, /*on_false=*/%s10_s10
 %s9_s9 = sphi %s0_s0, %s8_s8
 %s10_s10 = sadd.s32 1, %s9_s9
 %p2_p2 = scmp.ne.s32.totalorder %s9_s9, %s8_s8
 %p3_p3 = scmp.eq.s32.totalorder %s5_s5, 4
 %s11_s11 = sld [smem:[#allocation7 + %s5_s5]]
 %p4_p4 = scmp.ne.s32.totalorder %s11_s11, 0
 %s20_s2 = scalar_lea.hbm %s99_s9, 128
 %s21_s3 = int_to_ptr.vmem [resolvable:$true] %s98_s8
"""
WINDOW = """\
base_bounds: (16, 30, 8)
dynamic_base_bounds: (16, 30, 8)
window_bounds: {window}
element_size_in_bytes: 4096
second_minor_factor: 1 */ }}
"""


def code() -> ScalarCode:
    found = ScalarCode()
    for bundle, line in enumerate(CODE.splitlines()):
        found.add(bundle, line)
    return found


def read(start: str, window: str = "(1, 10, 2)", grid: tuple[int, ...] = GRID) -> list[Transfer]:
    reader = TransferReader()
    for line in (start + " /* ", *WINDOW.format(window=window).splitlines()):
        reader.line(7, line)
    return reader.transfers(code(), {}, grid).get(7, [])


def copy(kind: str = "hbm_to_vmem", predicate: str = "", size: str = "2560") -> str:
    ends = {"hbm_to_vmem": ("hbm", "vmem"), "vmem_to_hbm": ("vmem", "hbm")}.get(kind, ("src", "dst"))
    return (
        f"  0x7  : {{ %9 = dma.{kind} [thread:$0]  {predicate}/*{ends[0]}=*/%s20_s2, /*size_in_granules=*/{size}, "
        f"/*{ends[1]}=*/%s21_s3, /*dst_syncflagno=*/%s1_s1"
    )


def test_a_copy_has_its_size_and_its_direction():
    assert read(copy()) == [Transfer(False, 2560 * 32, 1.0)]
    assert read(copy("vmem_to_hbm", size="10240"), "(1, 10, 8)") == [Transfer(True, 327680, 1.0)]


@pytest.mark.parametrize(
    ("predicate", "share"),
    [("(%p2_p2), ", 1 / 5), ("(!%p3_p3), ", 1.0), ("(%p4_p4), ", None), ("(%p77_p7), ", None)],
    ids=["indices 0 and 1", "index 2", "data", "nothing known"],
)
def test_a_block_is_fetched_where_an_index_changes_that_it_depends_on(predicate, share):
    (found,) = read(copy(predicate=predicate))
    # share() knows the grid's index alone: all but one of five.
    expected = 4 / 5 if "p3" in predicate else share
    assert found.share == (None if expected is None else pytest.approx(expected))


def test_a_grid_whose_size_is_an_operand_leaves_it_open():
    (found,) = read(copy(predicate="(%p2_p2), "), grid=(4, 3, UNBOUNDED))
    assert found.share is None


def test_the_end_of_a_general_copy_that_is_no_core_memory_is_hbm():
    (found,) = read(copy("general"))
    assert not found.written  # from an address in HBM to one in the core


def test_a_size_that_is_no_constant_is_that_of_an_uneven_array():
    (found,) = read(copy(size="%s5_s5"), "(1, 16, 8)")
    assert found.size_bytes == 16 * 8 * 4096 * 30 // 32  # 30 rows of tiles in blocks of 16: the second has 14


def test_a_copy_of_a_real_dump():
    body = read_schedules(DUMP)["broadcast.1442.clone"].body
    (found,) = [copy for region in body.walk() for copy in region.transfers]
    assert found.written and found.size_bytes == 262144
