"""`tomat profile` as a script: where the cycles of a step went, from a profile or a compiled program.

python profiling/parse_profile.py runs/demo --docs docs/tracking
python profiling/parse_profile.py gs://bucket/runs/r1/profiler --json r1.json
python profiling/parse_profile.py compare a.json b.json
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

from tomat.app.cli import run_verb  # noqa: E402 - after the path is set
from tomat.app.profile_verbs import EPILOG, add_arguments  # noqa: E402
from tomat.base.arguments import Parser  # noqa: E402 - after the path is set


def main() -> int:
    parser = Parser(
        description="Where the cycles of a step went.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,  # `add_arguments` adds that of the forms
    )
    add_arguments(parser)
    return run_verb(parser)


if __name__ == "__main__":
    sys.exit(main())
