import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.base.errors import TomatError
from tomat.perf.cost.llo import (
    OpSchedule,
    Region,
    Transfer,
    TransferReader,
    read_schedule,
    read_schedules,
    slot_utilisation,
)
from tomat.perf.cost.scalar_code import UNBOUNDED, ScalarCode

DUMP = Path(__file__).parent / "data" / "llo"
BROADCAST = "broadcast.1442.clone"
SPLASH = "splash_mha_fwd_residuals.14"


def outline(region: Region) -> list:
    return [region.kind, region.first_bundle, region.bundles, [outline(inner) for inner in region.regions]]


def bundles(schedule: OpSchedule) -> int:
    """Each counted once."""
    return sum(region.bundles for region in schedule.body.walk())


def test_a_pipelined_copy_loop(schedules):
    schedule = schedules[BROADCAST]
    assert outline(schedule.body) == ["body", 0, 16, [["loop", 0xA, 20, [["branch", 0x13, 39, []]]]]]
    (loop,) = schedule.body.regions
    (body,) = loop.regions
    # 512 blocks of the 8 x 64 grid and five more iterations for the transfers under way.
    assert (loop.executions, body.executions) == (517, pytest.approx(512 / 517))
    assert schedule.executed(lambda region: region.bundles) == pytest.approx(16 + 517 * 20 + 512 * 39)
    assert schedule.grid == (8, 64, 1)
    (copied,) = [copy for region in schedule.body.walk() for copy in region.transfers]
    assert copied.written and copied.size_bytes == 262144


def test_a_pallas_kernel_with_spilled_counters(schedules):
    schedule = schedules[SPLASH]
    inner = [["branch", 0x49, 2, []], ["branch", 0x5E, 15, []], ["branch", 0x74, 4, []]]
    assert outline(schedule.body) == ["body", 0, 10, [["loop", 0xA, 65, [["branch", 0x42, 39, inner]]]]]
    (loop,) = schedule.body.regions
    (step,) = loop.regions
    assert loop.executions == 8 * 16 * 16 * 16 + 2
    assert step.executions == pytest.approx(32768 / 32770)
    assert [(r.executions, r.operand) for r in step.regions] == [(1 / 16, None), (None, 1), (1 / 16, None)]
    assert step.regions[1].mxu_cycles == 2 * 8 + 2 * 4  # of each unit, two products in bf16 and two in f32
    # Blocks of queries, keys and values, 64 padded to 128 lanes.
    assert [(copy.written, copy.size_bytes) for copy in loop.transfers] == [(False, 512 * 128 * 2)] * 3
    assert schedule.executed(
        lambda region: region.bundles, lambda region: 0.5 if region.operand == 1 else None
    ) == pytest.approx(10 + 32770 * 65 + 32768 * (39 + 2 / 16 + 15 / 2 + 4 / 16))


@pytest.mark.parametrize(
    ("products", "cycles"),
    [
        # libtpu 0.0.46 for v6e, TPU7x and v5p, in this order.
        (["vmatmul.mubr.msk.bf16.gmra.mxu0 %vm1, %v2", "vmatmul.mubr.f32.gmra.mxu1 %v1"], 8),
        (["vmatmul.mubr.bf16.gmra.mrb[180].mxu0 %v1", "vmatmul.mubr.bf16.vlgmr.msra.gmra.mrb[184].mxu0 %v2"], 16),
        (["vmatmul.mubr.f32.gmra.mrb[198].mxu0 %v1", "vmatmul.mubr.f32.gmra.mrb[198].mxu1 %v1"], 4),
        (["vmatmul.mubr.s8.gmra.mrb[180].mxu0 %v1", "vmatmul.mubr.s8.gmra.mrb[184].mxu1 %v2"], 8),
        (["vmatmul.bf16.gmra.mxu2 %v1", "vmatmul.msk.bf16.vlgmr.msrb.gmra.mxu3 %vm1, %v1"], 16),
        (["vmatmul.f32.gmra.mxu3 %v1", "vmatmul.lmr.bf16.gmra.16.mxu3 %v1"], 16),
        (["vmatpush.bf16.msra.mxu0 %v1", "vmatprep.mubr.bf16.mxu0 %v1"], 0),
    ],
)
def test_products_keep_their_unit_busy(tmp_path, products, cycles):
    slots = "  ;;  ".join(f"%{number} = {product}" for number, product in enumerate(products))
    (tmp_path / "1-op-02-final_bundles.txt").write_text(f"     0   :  {{ {slots} }}\n   0x1   :  {{ %9 = vnop }}\n")
    assert read_schedules(tmp_path)["op"].body.mxu_cycles == cycles


def test_the_last_of_several_schedules_and_odd_names(tmp_path):
    (path,) = DUMP.glob(f"*-{BROADCAST}-*-final_bundles.txt")
    shutil.copy(path, tmp_path / "20-<late-initialization>-03-final_bundles.txt")
    shutil.copy(path, tmp_path / "20-slice.103-02-schedule-analysis_final_bundles.txt")
    shutil.copy(path, tmp_path / "20-fusion.1-02-final_bundles.txt")
    (tmp_path / "20-fusion.1-03-final_bundles.txt").write_text("     0   :  {}\n   0x1   :  {}\n")
    found = read_schedules(tmp_path)
    assert {name: bundles(schedule) for name, schedule in found.items()} == {"<late-initialization>": 75, "fusion.1": 2}
    assert slot_utilisation(found["fusion.1"]) == {}


def test_what_is_no_dump_is_refused(tmp_path):
    with pytest.raises(TomatError, match="xla_jf_dump_llo_text"):
        read_schedules(tmp_path)
    empty = tmp_path / "1-a-03-final_bundles.txt"
    empty.write_text("= control target key start\n")
    with pytest.raises(TomatError, match="no VLIW bundles"):
        read_schedules(tmp_path)


def test_a_dump_cut_short_is_refused(tmp_path):
    for path in DUMP.glob(f"*-{BROADCAST}-*"):
        text = path.read_text()
        (tmp_path / path.name).write_text(text[:4000] if "bundles.txt" in path.name else text)
    with pytest.raises(TomatError, match=r"\d+ bundles, but 75 rows"):
        read_schedules(tmp_path)


@dataclass
class Nest:
    """Bundles, or a region around more of them: `limit` is a trip count or what the counter is compared with."""

    kind: str
    limit: int
    inside: "list[Nest]"


def nests() -> st.SearchStrategy[list[Nest]]:
    straight = st.builds(Nest, st.just("straight"), st.integers(1, 6), st.just([]))
    items = st.recursive(
        straight,
        lambda inner: st.builds(
            Nest, st.sampled_from(["loop", "branch"]), st.integers(1, 5), st.lists(inner, max_size=3)
        ),
        max_leaves=8,
    )
    return st.lists(items, min_size=1, max_size=4)


class Writer:
    """Writes nests the way the compiler does."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.values = 0

    def bundle(self, text: str = "", label: str = "  ") -> None:
        self.lines.append(f"{hex(len(self.lines)):>6} {label}: {{ {text} }}")

    def write(self, items: list[Nest], counter: str) -> None:
        for item in items:
            self.values += 10
            v = self.values
            if item.kind == "straight":
                for _ in range(item.limit):
                    self.bundle("%v1_v1 = vld [vmem:[%s1_s1] sm:$0xff]")
            elif item.kind == "loop":
                self.bundle(f"%s{v}_s1 = smov 0 /* copy for cssa */")
                self.bundle(f"%s{v + 1}_s1 = sphi %s{v}_s1, %s{v + 2}_s2 }} /* Start region {v} */ {{", "LB")
                self.write(item.inside, f"%s{v + 1}_s1")
                self.bundle(f"%s{v + 2}_s2 = sadd.s32 1, %s{v + 1}_s1")
                self.bundle(f"%p{v}_p0 = scmp.ge.s32.totalorder %s{v + 2}_s2, {item.limit} /* loop exit test */")
                self.bundle(f"%1 = sbr.rel (!%p{v}_p0) target = $region{v}")
                for _ in range(4):
                    self.bundle()
            else:
                self.bundle(f"%p{v}_p1 = scmp.ge.s32.totalorder {counter or 0}, {item.limit}")
                self.bundle(f"%2 = sbr.rel (%p{v}_p1) target = $region{v}")
                for _ in range(4):
                    self.bundle()
                self.write(item.inside, counter)
                self.bundle(f"%s{v}_s9 = smov 7 }} /* Start/End empty region {v} */ {{", "PF")


def run(items: list[Nest], counter: int) -> int:
    """Bundles that a machine would execute."""
    count = 0
    for item in items:
        if item.kind == "straight":
            count += item.limit
        elif item.kind == "loop":
            count += 1 + sum(1 + run(item.inside, i) + 2 + 5 for i in range(item.limit))
        else:
            count += 6 + (run(item.inside, counter) if counter < item.limit else 0) + 1
    return count


@settings(max_examples=60, deadline=None)
@given(nests())
def test_executed_bundles_are_those_a_machine_executes(tmp_path_factory, items):
    writer = Writer()
    writer.write(items, "")
    path = tmp_path_factory.getbasetemp() / "1-op-03-final_bundles.txt"
    path.write_text("\n".join(writer.lines) + "\n")
    schedule = read_schedule(path, None)
    assert bundles(schedule) == len(writer.lines)
    assert schedule.executed(lambda region: region.bundles) == pytest.approx(run(items, 0))


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
    ("predicate", "grid", "share"),
    [("%p2_p2", GRID, 1 / 5), ("!%p3_p3", GRID, 4 / 5), ("%p4_p4", GRID, None), ("%p77_p7", GRID, None),
     ("%p2_p2", (4, 3, UNBOUNDED), None)],
    ids=["indices 0 and 1", "index 2", "data", "nothing known", "a size that is an operand"],
)  # fmt: skip
def test_a_block_is_fetched_where_an_index_changes_that_it_depends_on(predicate, grid, share):
    (found,) = read(copy(predicate=f"({predicate}), "), grid=grid)
    assert found.share == (None if share is None else pytest.approx(share))


def test_a_size_that_is_no_constant_is_that_of_an_uneven_array():
    (found,) = read(copy(size="%s5_s5"), "(1, 16, 8)")
    assert found.size_bytes == 16 * 8 * 4096 * 30 // 32  # 30 rows of tiles in blocks of 16: the second has 14
