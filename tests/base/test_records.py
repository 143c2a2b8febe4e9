"""Damage in a record is one line that names the file, the key, what was found and what was expected."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import pytest

from tomat.base.documents import is_as_signed, signed
from tomat.base.errors import TomatError
from tomat.base.records import Amount, Count, Sha256, read_typed, typed
from tomat.measure.lab.max_batch import MaxBatchRecord
from tomat.report.html.kinds import page_of
from tomat.report.pages.report import read_record

TRACKING = Path(__file__).parents[2] / "docs" / "tracking"


@dataclass(frozen=True)
class Row:
    seconds: Amount
    count: Count = 0
    name: str = ""

    def __post_init__(self) -> None:
        if self.name == "bad":
            raise ValueError("expected another name")


class Record(TypedDict):
    rows: tuple[Row, ...]
    shares: dict[str, Amount]


def record(**changes) -> dict:
    return {"rows": [{"seconds": 1.5, "count": 2}, {"seconds": 0} | changes], "shares": {"a": 0.5}}


def test_a_whole_record_is_what_was_written(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(record(later="version")))
    assert read_typed(path, Record, "") == {"rows": (Row(1.5, 2), Row(0.0)), "shares": {"a": 0.5}}


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        (record(seconds="1"), "rows[1].seconds is '1'; expected float, got str"),
        (record(seconds=-1), "rows[1].seconds is -1; expected float >= 0"),
        (record(later=[{"deep": math.nan}]), "rows[1].later[0].deep is nan; expected a number up to 1e+30"),
        (record(count=10**5000), "rows[1].count is a number of 16610 bits"),
        (record(name=["a\nb"]), "rows[1].name is list of 1; expected str"),
        (record(name="bad"), "rows[1] is dict of 2; expected another name"),
        ({"rows": []}, "it is dict of 1; expected an object with the key shares"),
        ([], "it is list of 0; expected object"),
    ],
)
def test_damage_is_one_line_with_its_place(damaged, said):
    with pytest.raises(TomatError) as error:
        typed(damaged, Record, "r.json", "Write it again.")
    text = str(error.value)
    assert text.startswith("r.json is damaged: ") and said in text and text.endswith(". Write it again.")
    assert "\n" not in text


def test_deep_nesting_does_not_recurse():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TomatError):
        typed({"rows": deep, "shares": {}}, Record, "r.json", "")
    assert typed({"rows": [], "shares": {}, "later": deep}, Record, "r.json", "")["rows"] == ()
    while deep:  # freed level by level, as CPython does not
        deep = deep[0]


def test_another_version_is_told_from_damage_and_its_keys_are_refused_where_asked():
    with pytest.raises(TomatError, match=r"rows.\[1\].later"):
        typed(record(later=1), Record, "r.json", "", extra_keys=False)
    for stated in (2, "1", True, None):
        with pytest.raises(TomatError, match="r.json has format .*; this tomat reads 1"):
            typed(record() | {"format": stated}, Record, "r.json", "", version=("format", 1))


@pytest.mark.parametrize("wrong", ["0" * 63, "0" * 65, "g" * 64, "0" * 64 + "\n"])
def test_hashes_are_hexadecimal(wrong):
    with pytest.raises(TomatError):
        typed(["0" * 64, wrong], list[Sha256], "r.json", "")


def test_a_signed_text_is_told_from_a_changed_one():
    text = "a: 1\nb: x\n"
    assert is_as_signed(signed(text)) is True and is_as_signed(text) is None
    assert is_as_signed(signed(text).replace("1", "2", 1)) is False
    assert is_as_signed(signed(text).rstrip()[:-1]) is False


@pytest.mark.parametrize("folder", ["lab", "sweeps", "data"])
def test_records_of_before_are_read(folder):
    for path in sorted((TRACKING / folder).glob("*.json")):
        if folder == "data":
            assert read_record(TRACKING, path.stem)["run"]
        elif path.name.startswith("max-batch"):
            assert read_typed(path, MaxBatchRecord, "", version=("record_format", 1)).searches
        elif not path.name.startswith("quality"):
            assert page_of(str(path)).sections
