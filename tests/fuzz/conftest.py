"""How many inputs the fuzzers tried: `pytest -n0 tests/fuzz` prints them in a table. And `damage.py`, which is in no
package: the tests have it as `sys.modules["fuzz_damage"]`."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

_spec = importlib.util.spec_from_file_location("fuzz_damage", Path(__file__).with_name("damage.py"))
assert _spec is not None and _spec.loader is not None
_damage = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _damage
_spec.loader.exec_module(_damage)

INPUTS = "fuzz_inputs"


@pytest.fixture
def tried(request: pytest.FixtureRequest) -> Any:
    """`tried("xplane", 400, 120)`: record that 400 inputs were read, 120 of which were refused."""

    def record(reader: str, inputs: int, refused: int) -> None:
        request.node.user_properties.append((INPUTS, (reader, inputs, refused)))

    # `pytest -n0 tests/fuzz --fuzz_factor 30` tries 30 times as many inputs as CI does.
    record.factor = request.config.getoption("--fuzz_factor", default=1)
    return record


def pytest_addoption(parser: pytest.Parser) -> None:
    """How many times as many inputs as in CI."""
    parser.addoption("--fuzz_factor", type=int, default=1)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the counts and their sum."""
    reports = [report for group in terminalreporter.stats.values() for report in group if hasattr(report, "when")]
    rows = sorted(
        value for report in reports if report.when == "call" for name, value in report.user_properties if name == INPUTS
    )
    if rows:
        terminalreporter.section("damaged inputs tried")
        for reader, inputs, refused in rows:
            terminalreporter.write_line(f"{reader}: {inputs:,}, {refused:,} of them refused")
        terminalreporter.write_line(f"together: {sum(row[1] for row in rows):,}")
