"""`pytest -n0 tests/fuzz --fuzz_factor 30` tries 30 times as many damaged inputs as CI does."""

import fuzz_damage
import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz_factor", type=int, default=1, help="times as many damaged inputs as in CI")


def pytest_configure(config: pytest.Config) -> None:
    fuzz_damage.FACTOR = config.getoption("--fuzz_factor", default=1)
