import pytest
from hlo_text import counted_loop, program_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.hardware.chips import slice_named
from tomat.perf.cost.chip_model import RING_EFFICIENCY, START_SECONDS, LinkRates
from tomat.perf.cost.estimate import estimate_step
from tomat.perf.cost.interconnect import (
    HOP_SECONDS,
    collective_seconds,
    coordinates,
    entrances_and_hops,
    overlap,
    participants,
    route,
)
from tomat.perf.profile.hlo import HloProgram
from tomat.perf.profile.hlo_files import program_from_text

V6E_4, V6E_16, V6E_256 = slice_named("v6e-4"), slice_named("v6e-16"), slice_named("v6e-256")
LINK = 90e9
RING = 59e9
"""Bytes a second one way over a v6e link: 800e9 over 4 ports and 2 directions, of which 0.9 is reached."""
MIB = 2**20
IDS = "use_global_device_ids=true"


ADD = "add {\n  p = bf16[] parameter(0)\n  q = bf16[] parameter(1)\n  ROOT s = bf16[] add(p, q)\n}"


def collective(operation: str, operand: str, n_partitions: int) -> HloProgram:
    entry = f"  a = {operand} parameter(0)\n  ROOT y = {operation}"
    return program_of(entry, ADD, how=f"num_partitions={n_partitions}")


def one(operation: str, operand: str, n_partitions: int, slice_):
    program = collective(operation, operand, n_partitions)
    found = collective_seconds(program, program.by_name["y"], slice_)
    assert found is not None
    return found


def test_an_all_gather_is_bound_by_the_corners_two_links():
    how = "channel_id=1, replica_groups=[1,16]<=[16], dimensions={0}, use_global_device_ids=true"
    gathered = one(f"bf16[64,1024,1024]{{2,1,0}} all-gather(a), {how}", "bf16[4,1024,1024]{2,1,0}", 16, V6E_16)
    assert gathered.n_participants == 16
    assert gathered.link_bytes == 15 * 8 * MIB
    assert gathered.seconds == pytest.approx(15 * 8 * MIB / (2 * RING) + 6 * HOP_SECONDS)
    assert (gathered.exposed_seconds, gathered.hidden_seconds) == (gathered.seconds, 0.0)


def test_measured_rates_take_the_place_of_the_assumed_ones():
    shape = "bf16[4,1024,1024]{2,1,0}"
    groups = "channel_id=1, replica_groups=[1,16]<=[16], use_global_device_ids=true, to_apply=add"
    program = collective(f"{shape} all-reduce(a), {groups}", shape, 16)
    assumed = overlap(program, lambda i: 0.0, V6E_16)["y"]
    measured = overlap(program, lambda i: 0.0, V6E_16, LinkRates(3e-6, RING_EFFICIENCY / 2))["y"]
    hops = 2 * 6 * HOP_SECONDS
    assert measured.seconds - hops == pytest.approx(2 * (assumed.seconds - hops))
    assert measured.exposed_seconds == pytest.approx(measured.seconds + 3e-6)


def test_an_all_reduce_scatters_and_gathers():
    shape = "bf16[4,1024,1024]{2,1,0}"
    groups = "channel_id=1, replica_groups=[1,256]<=[256], use_global_device_ids=true, to_apply=add"
    reduced = one(f"{shape} all-reduce(a), {groups}", shape, 256, V6E_256)
    scattered = one(f"bf16[4,4,1024]{{2,1,0}} reduce-scatter(a), dimensions={{1}}, {groups}", shape, 256, V6E_256)
    # a whole pod closes both axes: four links into each chip, at most 8 + 8 hops
    assert scattered.seconds == pytest.approx(8 * MIB * 255 / 256 / (4 * RING) + 16 * HOP_SECONDS)
    assert reduced.seconds == pytest.approx(2 * scattered.seconds)


def test_a_permute_takes_the_way_of_its_pairs():
    shape = "bf16[4,1024,1024]{2,1,0}"
    permute = f"{shape} collective-permute(a), channel_id=1, source_target_pairs="
    neighbours = one(permute + "{{0,1},{1,0}}", shape, 4, V6E_4)
    assert neighbours.seconds == pytest.approx(8 * MIB / LINK + HOP_SECONDS)
    # 0 -> 3 and 1 -> 2 share a link of the row
    crowded = one(permute + "{{0,3},{1,2}}", shape, 16, V6E_16)
    assert crowded.seconds == pytest.approx(2 * 8 * MIB / LINK + 3 * HOP_SECONDS)


def test_an_all_to_all_crosses_the_middle():
    shape = "bf16[4,1024,1024]{2,1,0}"
    groups = "channel_id=1, replica_groups=[4,4]<=[16], dimensions={0}"
    swapped = one(f"{shape} all-to-all(a), {groups}", shape, 16, V6E_16)
    # in a row of four, the middle link carries the quarters of 2 x 2 pairs each way
    assert swapped.seconds == pytest.approx(4 * 2 * MIB / LINK + 3 * HOP_SECONDS)


PERMUTES = """
HloModule m, is_scheduled=true, num_partitions=4
ENTRY e {
  a = bf16[4,1024,1024]{2,1,0} parameter(0)
  b = bf16[1024,1024]{1,0} parameter(1)
  first = (bf16[4,1024,1024]{2,1,0}, bf16[4,1024,1024]{2,1,0}, u32[], u32[])
    collective-permute-start(a), channel_id=1, source_target_pairs={{0,1},{1,0}}
  SECOND
  work = bf16[1024,1024]{1,0} dot(b, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  first_done = bf16[4,1024,1024]{2,1,0} collective-permute-done(first)
  rest = bf16[1024,1024]{1,0} negate(work)
  ROOT all = (bf16[4,1024,1024]{2,1,0}, bf16[1024,1024]{1,0}) tuple(first_done, rest)
}
"""
TRANSFER = 8 * MIB / LINK + HOP_SECONDS


@pytest.fixture(scope="module")
def one_transfer() -> HloProgram:
    return program_from_text(PERMUTES.replace("SECOND", ""), "inline")


@settings(max_examples=30, deadline=None)
@given(st.floats(0, 3e-4))
def test_a_transfer_hides_behind_what_runs_before_its_done(one_transfer, work_seconds):
    times = overlap(one_transfer, lambda i: work_seconds if i.name == "work" else 1.0, V6E_4)
    assert set(times) == {"first", "first_done"}
    waited, hidden = times["first_done"].exposed_seconds, times["first"].hidden_seconds
    assert waited == pytest.approx(START_SECONDS + max(0.0, TRANSFER - work_seconds), abs=1e-12)
    assert waited + hidden == pytest.approx(TRANSFER + START_SECONDS)
    assert times["first"].exposed_seconds == times["first_done"].hidden_seconds == 0.0


def test_transfers_on_the_same_link_queue_and_on_others_do_not():
    second = """second = (bf16[4,1024,1024]{2,1,0}, bf16[4,1024,1024]{2,1,0}, u32[], u32[])
      collective-permute-start(a), channel_id=2, source_target_pairs=PAIRS
    second_done = bf16[4,1024,1024]{2,1,0} collective-permute-done(second)"""
    waits = {}
    for pairs in ("{{0,1}}", "{{2,3}}"):
        program = program_from_text(PERMUTES.replace("SECOND", second.replace("PAIRS", pairs)), "inline")
        times = overlap(program, lambda i: 0.0, V6E_4)
        waits[pairs] = times["second_done"].exposed_seconds
        # nothing runs but transfers: none of it is hidden, and the first is done when the second is
        assert times["first"].hidden_seconds == 0.0
        assert times["first_done"].exposed_seconds == pytest.approx(START_SECONDS)
    assert waits["{{0,1}}"] == pytest.approx(2 * TRANSFER + START_SECONDS)
    assert waits["{{2,3}}"] == pytest.approx(TRANSFER + START_SECONDS)


def test_a_fusion_hides_what_it_gathers_behind_its_own_product():
    fused = f"""fused {{
  a = bf16[1024,1024]{{1,0}} parameter(0)
  w = bf16[4096,1024]{{1,0}} parameter(1)
  g = bf16[4096,1024]{{1,0}} all-gather(a), channel_id=1, replica_groups=[1,4]<=[4], dimensions={{0}}, {IDS}
  ROOT d = bf16[4096,4096]{{1,0}} dot(g, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
}}"""
    entry = """a = bf16[1024,1024]{1,0} parameter(0)
  w = bf16[4096,1024]{1,0} parameter(1)
  ROOT f = bf16[4096,4096]{1,0} fusion(a, w), kind=kOutput, calls=fused"""
    program = program_of(entry, fused, how="is_scheduled=true, num_partitions=4")
    transfer = 3 * 2 * MIB / (2 * RING) + 2 * HOP_SECONDS
    short = overlap(program, lambda i: transfer / 3, V6E_4)["f"]
    assert short.seconds == pytest.approx(transfer)
    assert short.hidden_seconds == pytest.approx(transfer / 3)
    assert short.exposed_seconds == pytest.approx(2 * transfer / 3 + START_SECONDS)
    assert overlap(program, lambda i: 10 * transfer, V6E_4)["f"].exposed_seconds == pytest.approx(START_SECONDS)


def spread_gather(side: int, trips: int) -> HloProgram:
    """A gather as libtpu spreads it: start, a part in each turn of a loop, done; each kernel holds the whole gather."""
    array, whole = f"bf16[{side},{side}]{{1,0}}", f"bf16[{4 * side},{side}]{{1,0}}"
    gather = f"{whole} all-gather(a), channel_id=7, replica_groups=[1,4]<=[4], dimensions={{0}}, {IDS}"
    first = f"first {{\n  a = {array} parameter(0)\n  ROOT g = {gather}\n}}"
    part = f"""part {{
  a = {array} parameter(0)
  w = {array} parameter(1)
  g = {gather}
  ROOT d = {array} dot(a, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
}}"""
    body = f"piece = {array} fusion(a, a), kind=kOutput, calls=part"
    loop = counted_loop("loop", {"n": "s32[]", "a": array}, body, str(trips), n="next", a="piece")
    entry = f"""  a = {array} parameter(0)
  zero = s32[] constant(0)
  async-collective-start = {whole} fusion(a), kind=kLoop, calls=first
  s = (s32[], {array}) tuple(zero, a)
  w = (s32[], {array}) while(s), condition=loop_cond, body=loop_body
  async-collective-done = {whole} fusion(a), kind=kLoop, calls=first
  ROOT r = {array} get-tuple-element(w), index=1"""
    return program_of(entry, first, part, loop, how="is_scheduled=true, num_partitions=4")


@pytest.mark.parametrize("trips", [1, 8])
def test_a_gather_that_is_spread_over_the_kernels_of_a_loop_is_one(trips):
    program = spread_gather(1024, trips)
    transfer = 3 * 2 * MIB / (2 * RING) + 2 * HOP_SECONDS
    for seconds in (transfer / 2 / trips, transfer):
        times = overlap(program, lambda i, seconds=seconds: seconds if i.name == "piece" else 0.0, V6E_4)
        assert set(times) == {"async-collective-start", "async-collective-done"}
        waits = max(0.0, transfer - trips * seconds) + START_SECONDS
        assert times["async-collective-done"].exposed_seconds == pytest.approx(waits)
        assert times["async-collective-start"].hidden_seconds == pytest.approx(min(transfer, trips * seconds))
        assert sum(one.link_bytes for one in times.values()) == pytest.approx(3 * 2 * MIB)


def test_places_are_those_that_libtpu_gives_its_devices():
    # (id, coords) of get_topology_desc for v6e:4x8 and v5p:2x2x2, libtpu 0.0.46
    v6e = [coordinates(i, slice_named("v6e-32")) for i in (1, 4, 5, 27, 31)]
    assert v6e == [(1, 0), (0, 1), (1, 1), (3, 6), (3, 7)]
    assert [coordinates(i, slice_named("v5p-16")) for i in (1, 2, 4, 7)] == [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)]


chips = st.tuples(st.integers(0, 15), st.integers(0, 15))


@settings(max_examples=80, deadline=None)
@given(chips, chips)
def test_routes_arrive_by_the_shortest_way(source, target):
    links = route(source, target, V6E_256)
    here = list(source)
    for place, axis, step in links:
        assert tuple(here) == place
        here[axis] = (here[axis] + step) % 16
    assert tuple(here) == target
    around = [min(abs(a - b), 16 - abs(a - b)) for a, b in zip(source, target, strict=True)]
    assert len(links) == sum(around)


def test_the_worst_placed_chip_of_a_group():
    whole = [coordinates(i, V6E_16) for i in range(16)]
    assert entrances_and_hops(whole, V6E_16) == (2, 6)  # a corner, and the opposite one
    assert entrances_and_hops([(x, 0) for x in range(4)], V6E_16) == (1, 3)
    assert entrances_and_hops([(x, y) for x in range(16) for y in range(16)], V6E_256) == (4, 16)
    assert entrances_and_hops([(x, 3) for x in range(16)], V6E_256) == (2, 8)


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("[4,2]<=[8]", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['x'=2,'y'=4] {'x'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['x'=2,'y'=4] {'y'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['x'=8] {'x':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ],
)
def test_groups_in_every_spelling(written, groups):
    rest = "channel_id=1, dimensions={0}, use_global_device_ids=true"
    program = collective(f"f32[16]{{0}} all-gather(a), replica_groups={written}, {rest}", "f32[8]{0}", 8)
    assert participants(program, program.by_name["y"].proto) == groups


def test_products_that_carry_a_spread_gather_are_no_exposed_collectives():
    program = spread_gather(4096, 8)
    step = estimate_step(program, {}, slice_named("v6e-4"), title="spread")
    rows = {row.name: row for row in step.breakdown.categories}
    # 8 products of 2 * 4096^3 take 1.2 ms at the peak, the gather is over by then: its start alone is waited for.
    assert rows["matmul"].seconds > 8 * 2 * 4096**3 / 918e12
    assert rows["collectives, exposed"].seconds == pytest.approx(20e-6)
    # The whole gather once: 0.86 ms on the links; not in each of the ten kernels.
    assert sum(row["roofline"] for row in step.model_table().values()) < 2.2e-3


def test_cores_of_a_chip_share_its_links():
    add = "sum {\n  x = f32[] parameter(0)\n  y = f32[] parameter(1)\n  ROOT z = f32[] add(x, y)\n}"
    program = program_of(
        "  a = f32[16777216]{0} parameter(0)\n  ROOT ar = f32[16777216]{0} all-reduce(a), channel_id=1, "
        "replica_groups={{0,2,4,6},{1,3,5,7}}, use_global_device_ids=true, to_apply=sum",
        add,
        how="num_partitions=8",
    )
    found = collective_seconds(program, program.by_name["ar"], slice_named("tpu7x-8"))
    # Two links of 100 GB/s a chip, over which both cores' 2 * 3/4 * 64 MiB come.
    assert found.seconds > 2 * (2 * 3 / 4 * 2**26) / 200e9
