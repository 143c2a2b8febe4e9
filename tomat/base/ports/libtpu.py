"""The undocumented dumps of libtpu: the flags that ask for them, and the names of their files.

A compiled program does not say how its operations are scheduled; only libtpu's text dumps do. `perf/cost/llo.py` and
`scalar_code.py` say how the text is read, as found in dumps of this version.
"""

import re
from pathlib import Path

VERSION = "0.0.46"

FINAL_BUNDLES = re.compile(r"(\d+)-(.+)-(\d+)-final_bundles\.txt")
"""(time, operation, number of the pass) of a file with the bundles of an operation."""
UTILISATION = re.compile(r"(\d+-.+)-\d+-final_hlo-static-per-bundle-utilization\.txt")
"""`TIME-OPERATION` of a file with the slots that each of these bundles fills."""


def final_bundles_flags(folder: Path | str) -> list[str]:
    """Flags that make libtpu leave `FINAL_BUNDLES` and `UTILISATION` in a folder, and change nothing in the program.

    The regex keeps these alone: 0.2 GB instead of 8 GB for the 200M step, and a compile of 121 s instead of more than
    200 s.
    """
    return [
        f"--xla_jf_dump_to={folder}",
        "--xla_jf_dump_llo_text=true",
        "--xla_jf_emit_annotations=true",
        "--xla_jf_dump_llo_pass_label_regex=final_bundles|final_hlo-static-per-bundle",
    ]
