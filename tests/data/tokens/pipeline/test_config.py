"""Settings of re-tokenising that no set can have."""

import pytest

from tomat.base.errors import TomatError
from tomat.data.tokens.pipeline.config import load_retokenize_config

IMPLAUSIBLE = (
    ("--valences", "{Si: .nan}"),
    ("--valences", "{Si: -4}"),
    ("--valences", "{Si: 400}"),
    ("--valences", "{Si: true}"),
    ("--valences", "{Xx: 4}"),
    ("--max_skipped", ".nan"),
    ("--max_skipped", "-0.1"),
    ("--max_skipped", "1.5"),
    ("--electron_tolerance", ".nan"),
    ("--electron_tolerance", "1.5"),
)


@pytest.mark.parametrize(("flag", "value"), IMPLAUSIBLE)
def test_implausible_setting_is_refused(flag, value):
    with pytest.raises(TomatError, match=flag.removeprefix("--")):
        load_retokenize_config(None, ["--input", "in", "--output", "out", flag, value])


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--valences", "{Si: 4, H: 1.75, Fe: 14}"),
        ("--max_skipped", "0"),
        ("--max_skipped", "0.5"),
        ("--max_skipped", "3"),
    ],
)
def test_plausible_settings_pass(flag, value):
    load_retokenize_config(None, ["--input", "in", "--output", "out", flag, value])
