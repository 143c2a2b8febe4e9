"""XLA's parser of HLO text, which jaxlib has in a private module alone (`jax._src.lib.xla_client` wraps the same)."""

import subprocess
import sys

VERSION = "0.11.1"
"""Also of the field numbers in `perf/profile/protos.py`, which `tests/perf/profile/test_protos.py` reads out of the
installed library."""

_PARSER = """
import sys
import jaxlib._hlo
try:
    module = jaxlib._hlo.hlo_module_from_text(sys.stdin.buffer.read().decode("utf-8", errors="replace"))
    sys.stdout.buffer.write(module.as_serialized_hlo_module_proto())
except Exception as error:
    print(str(error).strip() or type(error).__name__, file=sys.stderr)
    sys.exit(1)
"""


def parse_hlo_text(text: str, longest_seconds: float) -> "subprocess.CompletedProcess[bytes]":
    """Parse HLO text in a process (0.1 s of CPU time). It writes the serialised module to stdout, or why not to stderr.

    XLA checks some things with assertions that end the process, such as a negative tile size in the entry's layout. A
    process that takes longer than `longest_seconds` ends in a `subprocess.TimeoutExpired`.
    """
    command = [sys.executable, "-c", _PARSER]
    return subprocess.run(command, input=text.encode(), capture_output=True, timeout=longest_seconds, check=False)
