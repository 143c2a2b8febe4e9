"""Where the cycles of a step went, the same as `tomat profile`: `python profiling/parse_profile.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

from tomat.app.entry import main  # noqa: E402 - after the path is set

if __name__ == "__main__":
    sys.exit(main(["profile", *sys.argv[1:]]))
