import sys

import pytest

from tomat.base.errors import TomatError
from tomat.perf.profile.xprof_check import check_against_xprof


def test_self_times_are_xprofs(tpu_profile):
    check = check_against_xprof(tpu_profile)
    assert check["n_operations"] > 400
    # xprof sums float64 microseconds; nothing but that rounding may differ
    assert check["largest_difference_seconds"] < 1e-12
    assert check["tomat_self_seconds"] == pytest.approx(check["xprof_self_seconds"], rel=1e-12)
    assert check["occurrences_differ"] == 0
    assert not list(tpu_profile.rglob("*op_stats*"))  # xprof's caches went elsewhere


def test_a_cpu_trace_has_no_xprof_rows(cpu_profile):
    with pytest.raises(TomatError, match="xprof finds no device operations"):
        check_against_xprof(cpu_profile)


def test_without_xprof_the_remedy_is_said(tpu_profile, monkeypatch):
    monkeypatch.setitem(sys.modules, "xprof", None)
    with pytest.raises(TomatError, match="uv sync --extra xprof"):
        check_against_xprof(tpu_profile)


def test_nothing_to_read(tmp_path):
    with pytest.raises(TomatError, match="xprof reads nothing else"):
        check_against_xprof(tmp_path)
