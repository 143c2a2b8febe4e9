"""Whole answers of `tomat plan`, kept so that the same question is answered without Levanter and JAX.

Reading a configuration imports them, which takes seconds; the question itself is text. An answer is found by that text:
the YAML file, the overrides, the slice, the calibration, tomat's own sources and every installed package.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tomat.base.overrides import parse_overrides, read_yaml
from tomat.base.reporting import write_json
from tomat.planning.calibration import Calibration
from tomat.planning.plan_cache import read_answer
from tomat.planning.sources import PACKAGE, installed_packages


class AnswerCache:
    """The answers below a plan cache."""

    def __init__(self, cache_dir: Path) -> None:
        self._folder = cache_dir / "answers"

    def key(
        self,
        config_path: Path,
        overrides: Sequence[str],
        slice_name: str | None,
        tracking_dir: Path,
        codec: Path | None,
    ) -> str | None:
        """Names a question; None where the compiler is missing, so that the compile says so.

        Raises:
            TomatError: The configuration is no YAML, or the overrides are malformed.
        """
        if importlib.util.find_spec("libtpu") is None:
            return None
        sources = hashlib.sha256()
        for path in sorted(path for kind in ("*.py", "*.json", "*.yaml") for path in PACKAGE.rglob(kind)):
            sources.update(f"{path.relative_to(PACKAGE).as_posix()} {path.stat().st_size}\n".encode())
            sources.update(path.read_bytes())
        question = {
            "config": read_yaml(config_path, "configs/train/"),
            "overrides": parse_overrides(overrides),
            "slice": slice_name,
            "calibration": repr(Calibration.load(tracking_dir)),
            "codec": hashlib.sha256(codec.read_bytes()).hexdigest() if codec is not None else None,
            "sources": sources.hexdigest(),
            "packages": installed_packages(),
        }
        return hashlib.sha256(json.dumps(question, sort_keys=True, default=str).encode()).hexdigest()[:24]

    def find(self, key: str | None) -> dict[str, Any] | None:
        """The report of `Plan.to_dict` that was kept for a question."""
        report = read_answer(self._folder / f"{key}.json")
        return {**report, "cached": True} if report is not None and "fits" in report else None

    def keep(self, key: str | None, report: dict[str, Any]) -> None:
        """Keep a report."""
        if key is not None:
            write_json(self._folder / f"{key}.json", report)
