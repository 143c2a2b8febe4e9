"""What a prediction saves pw.x, the same as `tomat bench scf-savings`: `python profiling/scf_savings.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

from tomat.app.entry import main  # noqa: E402 - after the path is set

if __name__ == "__main__":
    sys.exit(main(["bench", "scf-savings", *sys.argv[1:]]))
