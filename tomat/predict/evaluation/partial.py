"""The finished materials of an evaluation that has not ended, so that a stopped one goes on where it was."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tomat.base.records import typed_text
from tomat.base.reporting import write_text, writing
from tomat.predict.evaluation.result import MaterialResult


class PartialResults:
    """A file of JSON lines: first the settings, then one finished material a line.

    Args:
        settings: what decides the figures; a file of other settings is started afresh.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self._header = json.dumps({"settings": dict(settings)}, sort_keys=True)
        self.done = self._read()
        # Written anew, because a killed process may have left half a line at the end.
        lines = [self._header, *(json.dumps(asdict(result), sort_keys=True) for result in self.done.values())]
        write_text(self.path, "".join(f"{line}\n" for line in lines))

    def _read(self) -> dict[str, MaterialResult]:
        """Finished materials of the same settings, by id; a torn last line is dropped."""
        if not self.path.exists():
            return {}
        header, *rows = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        if header != self._header:
            return {}
        remedy = "Delete the file; its materials are then evaluated again."
        done = {}
        for number, row in enumerate(rows[:-1], start=2):
            result = typed_text(row, MaterialResult, f"{self.path}, line {number},", remedy, extra_keys=False)
            done[result.material_id] = result
        return done

    def add(self, result: MaterialResult) -> None:
        """Keep one finished material."""
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result), sort_keys=True) + "\n")
