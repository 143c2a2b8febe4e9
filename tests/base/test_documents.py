import math

import pytest

from tomat.base.documents import is_figure, parse_json, parse_yaml
from tomat.base.errors import TomatError


@pytest.mark.parametrize(
    "text",
    ["a: !!int x", "a: !!float x", "a: !!bool x", "a: !!timestamp x", "a: 2026-99-99", "a: 0b_", "a: [", "[" * 2000,
     "{[]: 1}", "a: !x y", b"\xff\xfe\x00"],
)  # fmt: skip
def test_yaml_that_is_none_is_one_line(text):
    with pytest.raises(TomatError, match="^f.yaml is not YAML .*Restore it.$") as refused:
        parse_yaml(text, "f.yaml")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "1" * 5000, b"\xff"])
def test_json_that_is_none(text):
    with pytest.raises(TomatError, match="^f.json is not JSON .*Write it again.$"):
        parse_json(text, "f.json")


def test_figures():
    assert all(is_figure(value) for value in (0, -1.5, 10**300, 1e308))
    # What reads it as a float would overflow.
    assert not any(is_figure(value) for value in (True, None, "1", math.nan, math.inf, [1], 10**400, -(10**400)))
