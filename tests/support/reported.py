"""The report of a verb or of a study."""

import json
from pathlib import Path
from typing import Any

from tomat.app.cli import main
from tomat.base.arguments import Parser


def reported(folder: Path, *words: object, parser: Parser | None = None, status: int = 0) -> dict[str, Any]:
    """What a command that ends with `status` writes with `--json`, into `folder`."""
    path = folder / "reported.json"
    assert main([*map(str, words), "--json", str(path)], parser) == status
    return json.loads(path.read_text())
