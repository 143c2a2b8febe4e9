import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.hardware.chips import slice_named
from tomat.perf.cost.interconnect import coordinates, entrances, hops_across, link_loads, participants, places, route
from tomat.perf.profile.hlo_files import program_from_text

V6E_16, V6E_256, V5P_16 = slice_named("v6e-16"), slice_named("v6e-256"), slice_named("v5p-16")


def test_places_are_those_that_libtpu_gives_its_devices():
    # (id, coords) of get_topology_desc for v6e:4x8 and v5p:2x2x2, libtpu 0.0.46
    assert [coordinates(i, slice_named("v6e-32")) for i in (1, 4, 5, 27, 31)] == [
        (1, 0),
        (0, 1),
        (1, 1),
        (3, 6),
        (3, 7),
    ]
    assert [coordinates(i, V5P_16) for i in (1, 2, 4, 7)] == [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)]


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


def test_a_mesh_without_wrap_is_crossed_on_foot():
    assert len(route((0, 0), (3, 3), V6E_16)) == 6
    assert len(route((0, 0), (15, 15), V6E_256)) == 2
    # all of a row send to its end: the last link carries all but the receiver's own
    row = [((x, 0), (3, 0), 10.0) for x in range(3)]
    assert max(link_loads(row, V6E_16).values()) == 30.0


def test_the_worst_placed_chip_of_a_group():
    whole = [coordinates(i, V6E_16) for i in range(16)]
    row = [(x, 0) for x in range(4)]
    pod = [(x, y) for x in range(16) for y in range(16)]
    ring = [(x, 3) for x in range(16)]
    assert (entrances(whole, V6E_16), hops_across(whole, V6E_16)) == (2, 6)  # a corner, and the opposite one
    assert (entrances(row, V6E_16), hops_across(row, V6E_16)) == (1, 3)
    assert (entrances(pod, V6E_256), hops_across(pod, V6E_256)) == (4, 16)
    assert (entrances(ring, V6E_256), hops_across(ring, V6E_256)) == (2, 8)


def gather(groups: str, n_partitions: int = 8):
    text = (
        f"HloModule m, num_partitions={n_partitions}\nENTRY e {{\n  a = f32[8]{{0}} parameter(0)\n"
        f"  ROOT y = f32[16]{{0}} all-gather(a), {groups} channel_id=1, dimensions={{0}}, "
        "use_global_device_ids=true\n}"
    )
    program = program_from_text(text, "inline")
    return participants(program, program.by_name["y"].proto)


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}},", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=[4,2]<=[8],", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("replica_groups=[4,2]<=[2,4]T(1,0),", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['x'=2,'y'=4] {'x'},", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['x'=2,'y'=4] {'y'},", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=mesh['x'=8] {'x':(2)2},", [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ],
)
def test_groups_in_every_spelling(written, groups):
    assert gather(written) == groups


def test_without_a_device_assignment_partitions_are_in_the_order_of_ids():
    program = program_from_text("HloModule m\nENTRY e {\n  ROOT a = f32[8]{0} parameter(0)\n}", "inline")
    assert places(program, V6E_16) == [coordinates(i, V6E_16) for i in range(16)]
