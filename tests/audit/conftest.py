"""The audit's figures: what each wrong result was, measured again by the test that holds it.

`uv run --extra plan pytest -n0 tests/audit` prints them in a table. Copied into an older checkout, the same files print
what that version gave: hence it repeats what other conftest files have, and imports nothing.
"""

from collections.abc import Callable
from typing import Any

import pytest

FIGURE = "audit_figure"


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str, str, object], None]:
    """`figure("A1", "loss of 20 rows at batch 64", 4.8519)`: record a measured value before asserting on it."""

    def record(point: str, what: str, value: object) -> None:
        request.node.user_properties.append((FIGURE, (point, what, str(value))))

    return record


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print every recorded figure, of passed and failed tests alike."""
    reports = [report for group in terminalreporter.stats.values() for report in group if hasattr(report, "when")]
    rows = sorted(
        value for report in reports if report.when == "call" for name, value in report.user_properties if name == FIGURE
    )
    if rows:
        terminalreporter.section("figures of the audit")
        for point, what, value in rows:
            terminalreporter.write_line(f"{point:4} {what}: {value}")
