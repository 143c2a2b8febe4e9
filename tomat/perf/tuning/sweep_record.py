"""The record of a sweep: what planned (`tomat plan --sweep`) and measured (`tomat lab run`) rows and files have in
common."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Required, TypedDict

from msgspec import Meta

from tomat.base.records import MAX_FIGURE, Count, read_typed

RECORD_FORMAT = 1
REMEDY = "Delete it and run it again."
"""Remedy for a damaged record."""
Figure = Annotated[float, Meta(gt=0, le=MAX_FIGURE)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
"""Duration of something that ran."""


class Interval(TypedDict):
    estimate: Figure
    low: Figure
    high: Figure


@dataclass(kw_only=True)
class SweptRow:
    name: str
    question: str = ""
    base: str | None
    """The row that it is compared with."""
    overrides: Mapping[str, Any]
    config_file: str


def ranked[Row: SweptRow](rows: Sequence[Row]) -> list[Row]:
    """The rows by `rank`: the fastest first, those without an answer last."""
    return sorted(rows, key=attrgetter("rank"))


class KeptRows[Row](TypedDict, total=False):
    """The keys of the file that a sweep needs to continue."""

    rows: Required[list[Row]]
    devices: str | None
    overhead_seconds_per_start: float | None
    measured_with: dict[str, Any]


class SweepRecord[Row](KeptRows[Row], total=False):
    """The keys of the file that its page shows."""

    rows: Required[list[Row]]
    sweep: Required[str]
    title: Required[str]
    introduction: Required[str]
    n_rows: Count
    n_fitting: Count
    n_measured: Count
    n_processors: Count | None
    same_settings: list[list[str]]
    ranking: list[str]


def read_record[Record](path: Path, kind: type[Record]) -> Record:
    return read_typed(path, kind, REMEDY, version=("record_format", RECORD_FORMAT))


def rows_on_record[Row: SweptRow](path: Path, kind: type[Row]) -> dict[str, Row]:
    """The rows on record by name; none if there is no record yet."""
    return {row.name: row for row in read_record(path, KeptRows[kind])["rows"]} if path.exists() else {}
