"""The report of a verb or of a study, and what refuses a verb."""

import json
from pathlib import Path
from typing import Any

from tomat.app.cli import build_parser, main
from tomat.base.arguments import Parser


def reported(folder: Path, *words: object, parser: Parser | None = None, status: int = 0) -> dict[str, Any]:
    """What a command that ends with `status` writes with `--json`, into `folder`."""
    path = folder / "reported.json"
    assert main([*map(str, words), "--json", str(path)], parser) == status
    return json.loads(path.read_text())


def run(*words: object) -> int:
    """The status of a verb; what refuses it is raised."""
    given = [str(word) for word in words]
    args = build_parser(given).parse_args(given)
    return args.run(args)
