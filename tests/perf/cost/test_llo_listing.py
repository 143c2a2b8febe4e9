import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tomat.base.errors import TomatError
from tomat.perf.cost.llo import read_schedules
from tomat.perf.cost.llo_listing import read_listed_schedules

DUMP = Path(__file__).parent / "data" / "llo_listing"
OP = "dot_general.5"
STAMP = "1795646399649953158"
LISTING, METADATA = f"{STAMP}-{OP}-00-post-delay-converter.txt", f"{STAMP}-{OP}-03-pb-metadata.txt"


@pytest.fixture
def dump(tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(DUMP, tmp_path / "dump"))


def change(path: Path, how: Callable[[str], str]) -> None:
    before = path.read_text()
    after = how(before)
    assert after != before
    path.write_text(after)


def test_it_is_the_schedule_of_the_final_bundles():
    (listed,) = read_listed_schedules(DUMP).values()
    assert listed == read_schedules(DUMP)[OP]
    loop = listed.body.regions[0]
    # 256 blocks of the 16 x 16 grid and ten more iterations for the transfers under way.
    assert (loop.kind, loop.first_bundle, loop.bundles, loop.executions) == ("loop", 12, 40, 266)
    assert loop.regions[0].executions == pytest.approx(256 / 266) and listed.grid == (16, 16, 1, 1)
    assert [transfer.written for region in listed.body.walk() for transfer in region.transfers] == [False]


def test_what_was_moved_before_a_branch_counts_where_it_stands(dump):
    # Region 19 runs where the branch of region 18, in bundle 35, is not taken; the compiler may move instructions of it
    # to bundles before that. The file has none such: here one stands in bundle 20.
    moved = "\\1      child_instructions {\n        start: 20\n        limit: 21\n      }\n"
    change(dump / METADATA, lambda text: re.sub(r'(description: "region19 .*\n)', moved, text))
    assert read_listed_schedules(dump) == read_listed_schedules(DUMP)


def test_what_is_no_op_is_left_out(dump):
    for name in ("TLP", "<late-initialization>"):
        shutil.copy(dump / LISTING, dump / f"{STAMP}-{name}-00-post-delay-converter.txt")
    assert list(read_listed_schedules(dump)) == [OP]
    (dump / LISTING).unlink()
    assert read_listed_schedules(dump) == {}


def test_what_is_no_dump_is_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(TomatError, match="xla_tpu_add_llo_regions_to_symbol_table"):
            read_listed_schedules(folder)


def test_damage_is_refused(dump):
    whole = (dump / METADATA).read_text()
    (dump / METADATA).write_text(whole[: len(whole) // 2])
    with pytest.raises(TomatError, match=r"pb-metadata\.txt: was cut short"):
        read_listed_schedules(dump)
    (dump / METADATA).write_text(whole.replace("exit bundle: ", ""))
    with pytest.raises(TomatError, match="which bundle is the last"):
        read_listed_schedules(dump)
    (dump / METADATA).write_text(whole)
    change(dump / LISTING, lambda text: text[: len(text) // 2])
    with pytest.raises(TomatError, match="is in one of them alone"):
        read_listed_schedules(dump)
    (dump / METADATA).unlink()
    with pytest.raises(TomatError, match=f"no metadata of {re.escape(OP)}"):
        read_listed_schedules(dump)
