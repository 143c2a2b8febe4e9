"""Reads HLO modules from files and bytes: text, `HloModuleProto`, `HloProto`, gzipped or not."""

from __future__ import annotations

import importlib
from pathlib import Path

from tomat.base.errors import TomatError
from tomat.profile.hlo import HloProgram, check_structure
from tomat.profile.protos import new_message
from tomat.profile.unpack import read_bytes, unpacked

HLO_SUFFIXES = (".txt", ".hlo", ".hlo.pb", ".txt.gz", ".hlo.gz", ".hlo.pb.gz")
XPLANE_SUFFIX = ".xplane.pb"


def is_hlo_path(path: str) -> bool:
    """Whether a path names an HLO module rather than a trace."""
    return path.endswith(HLO_SUFFIXES) or (path.endswith(".pb") and not path.endswith(XPLANE_SUFFIX))


def program_from_bytes(data: bytes, origin: str, program_id: int = 0) -> HloProgram:
    """The program in a serialised `HloProto` or `HloModuleProto`.

    Raises:
        TomatError: neither of the two can be read out of `data` (`origin` names it in the message).
    """
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
                raise TomatError(
                    f"{origin}: a damaged HLO module ({error}). Write it again, or copy it from where it was written."
                ) from None
            return HloProgram(module, program_id, assignment)
    raise TomatError(
        f"{origin}: {len(data):,} bytes that are neither an HloProto nor an HloModuleProto with an entry computation. "
        "Give the optimised module XLA wrote (--xla_dump_to, or compiled.runtime_executable().hlo_modules()[0]), whole."
    )


def program_from_text(text: str, origin: str) -> HloProgram:
    """The program of HLO text, read by XLA's parser.

    Raises:
        TomatError: XLA refuses the text (the first line of its reason is in the message).
    """
    # jaxlib exposes its HLO bindings nowhere else (jax._src.lib.xla_client wraps the same module).
    hlo_bindings = importlib.import_module("jaxlib._hlo")
    try:
        module = hlo_bindings.hlo_module_from_text(text)
    except Exception as error:  # jaxlib raises its own XlaRuntimeError, which it does not export by a stable name
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TomatError(
            f"{origin}: not HLO text that XLA can parse ({reason}). Expected `HloModule NAME, ...`, whole."
        ) from None
    return program_from_bytes(module.as_serialized_hlo_module_proto(), origin)


def load_program(path: Path) -> HloProgram:
    """The program in a `.txt`/`.hlo` (text) or `.pb` (protocol buffer) file, either gzipped (`.gz`) or not."""
    data = unpacked(read_bytes(path), str(path), "HLO module")
    if data.lstrip().startswith(b"HloModule"):
        return program_from_text(data.decode("utf-8", errors="replace"), str(path))
    return program_from_bytes(data, str(path))


def serialise_program(program: HloProgram) -> bytes:
    """The program as a serialised `HloProto`, fields that tomat does not read included."""
    message = new_message("HloProto")
    message.hlo_module.CopyFrom(program.module)
    return message.SerializeToString(deterministic=True)
