"""Reads HLO modules from files and bytes: text, `HloModuleProto`, `HloProto`, gzipped or not.

Gzipped files are unpacked up to a limit, because a few megabytes of gzip can hold gigabytes of zeros.
"""

import gzip
import io
import signal
import subprocess
import zlib
from pathlib import Path

from tomat.base.documents import read_bytes
from tomat.base.errors import TomatError
from tomat.base.ports.jaxlib import parse_hlo_text
from tomat.perf.profile.hlo import HloProgram, check_structure
from tomat.perf.profile.protos import new_message

ALWAYS_UNPACKED_BYTES = 64 * 2**20
MAX_RATIO = 100
"""Most unpacked bytes for each byte of gzip, above `ALWAYS_UNPACKED_BYTES`. The tests' profiles have 5 (xplane) to 9
(HLO), zeros have 1,030."""
MAX_UNPACKED_BYTES = 2**30
"""Four times the size of the profiler's limit of 1 M events as JSON (about 250 bytes each)."""


def unpacked(data: bytes, origin: str, what: str) -> bytes:
    """The content of a file, unpacked if it is gzip. `what` names the expected content in messages."""
    if data[:2] != b"\x1f\x8b":
        return data
    limit = min(MAX_UNPACKED_BYTES, max(ALWAYS_UNPACKED_BYTES, MAX_RATIO * len(data)))
    try:
        with gzip.open(io.BytesIO(data)) as file:
            content = file.read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise TomatError(f"{origin}: not a {what}: cannot be read ({error}). Cut off? Copy it again.") from None
    if len(content) > limit:
        raise TomatError(
            f"{origin}: {len(data):,} bytes of gzip unpack to more than {limit:,}, which no {what} does. If it is "
            "sound, unpack it with gunzip and give the unpacked file."
        )
    return content


HLO_SUFFIXES = (".txt", ".hlo", ".hlo.pb", ".txt.gz", ".hlo.gz", ".hlo.pb.gz")
XPLANE_SUFFIX = ".xplane.pb"


def is_hlo_path(path: str) -> bool:
    """Whether a path names an HLO module rather than a trace."""
    return path.endswith(HLO_SUFFIXES) or (path.endswith(".pb") and not path.endswith(XPLANE_SUFFIX))


def program_from_bytes(data: bytes, origin: str, program_id: int = 0) -> HloProgram:
    """The program in a serialised `HloProto` or `HloModuleProto`."""
    from google.protobuf.message import DecodeError

    for kind in ("HloProto", "HloModuleProto"):
        message = new_message(kind)
        try:
            message.ParseFromString(data)
        except DecodeError:
            continue
        module = message.hlo_module if kind == "HloProto" else message
        if module.computations and module.entry_computation_id in {c.id for c in module.computations}:
            assignment = message.buffer_assignment if kind == "HloProto" else None
            try:
                check_structure(module)
            except ValueError as error:
                raise TomatError(f"{origin}: a damaged HLO module ({error}). Write it again, or copy it.") from None
            return HloProgram(module, program_id, assignment, origin)
    raise TomatError(
        f"{origin} is no compiled program, or is damaged: {len(data):,} bytes without an entry computation. "
        "Give the optimised module XLA wrote (--xla_dump_to, or compiled.runtime_executable().hlo_modules()[0]), whole."
    )


LONGEST_PARSE_SECONDS = 300.0
"""Limit for parsing HLO text. A step with unrolled layers (8.5 MB, 30,831 instructions) takes 7 s on a busy machine."""


def program_from_text(text: str, origin: str) -> HloProgram:
    try:
        done = parse_hlo_text(text, LONGEST_PARSE_SECONDS)
    except subprocess.TimeoutExpired:
        raise TomatError(f"{origin}: XLA has not parsed this HLO text in {LONGEST_PARSE_SECONDS:.0f} s.") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[0] if lines else "its parser says nothing"
        if done.returncode < 0:
            # A failed assertion is `F0000 00:00:... FILE:LINE] ...`, after a line of absl's about logging.
            fatal = next((line for line in lines if line.startswith("F") and "] " in line), reason)
            reason = f"its parser ended with {signal.Signals(-done.returncode).name}: {fatal.split('] ', 1)[-1]}"
        raise TomatError(f"{origin}: not HLO text that XLA can parse ({reason}). Expected all of `HloModule NAME ...`.")
    return program_from_bytes(done.stdout, origin)


def load_program(path: Path) -> HloProgram:
    """The program in a `.txt`/`.hlo` (text) or `.pb` (protocol buffer) file, either gzipped (`.gz`) or not."""
    data = unpacked(read_bytes(path), str(path), "HLO module")
    if data.lstrip().startswith(b"HloModule"):
        return program_from_text(data.decode("utf-8", errors="replace"), str(path))
    return program_from_bytes(data, str(path))
