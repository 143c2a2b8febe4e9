"""`tomat plan` as a script: what a training step needs on a TPU slice, without the slice.

python profiling/plan_step.py --config_path configs/train/200m-v6e16.yaml
python profiling/plan_step.py --config_path configs/train/200m-v6e16.yaml --slice v6e-32 --sharding replicated
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

from tomat.app.cli import run_verb  # noqa: E402 - after the path is set
from tomat.app.plan_verbs import EPILOG, add_arguments  # noqa: E402
from tomat.base.arguments import Parser  # noqa: E402 - after the path is set


def main() -> int:
    parser = Parser(
        description="Compile the training step for a TPU slice on a machine without one.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    return run_verb(parser)


if __name__ == "__main__":
    sys.exit(main())
