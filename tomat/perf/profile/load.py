"""Opens anything that holds a breakdown: a trace, a run's folder, a compiled program, a plan, a breakdown in JSON."""

from pathlib import Path

from tomat.base.documents import read_json
from tomat.base.errors import TomatError
from tomat.base.layout import PROFILER_FOLDER
from tomat.hardware.chips import known_chip
from tomat.perf.profile.breakdown import Breakdown
from tomat.perf.profile.hlo import sound_parts
from tomat.perf.profile.hlo_files import is_hlo_path, load_program
from tomat.perf.profile.program_breakdown import breakdown_from_program
from tomat.perf.profile.trace import load_trace
from tomat.perf.profile.trace_breakdown import breakdown_from_trace


def load_breakdown(
    target: str, *, device_kind: str | None = None, session: str | None = None, program: str | None = None
) -> Breakdown:
    """The breakdown of `target`: a trace, a run's folder, an HLO module, a plan, or a breakdown in JSON. `device_kind`
    is JAX's name of the chip, if `target` does not hold it. `session` names a session of a profile directory (default:
    the newest), `program` the program of a trace whose executions are the steps (default: see `main_program`)."""
    path = Path(target)
    if "://" not in target and path.is_file():
        if is_hlo_path(path.name):
            _of_a_trace(target, "a compiled program", session, program)
            hlo = load_program(path)
            chip = known_chip(device_kind or "")
            if chip is None or chip.hbm_bytes_per_second is None:
                found = "a compiled program does not say which chip it is for"
                if device_kind:
                    found = f"no peak flops and bandwidth are known of --device_kind '{device_kind}'"
                raise TomatError(f"{target}: {found}; give --device_kind, such as 'TPU v6 lite'.")
            with sound_parts(hlo):
                return breakdown_from_program(hlo, device_kind=chip.device_kinds[0])
        if path.suffix == ".json" and not path.name.endswith(".trace.json"):
            data = read_json(path, "Write it again with --json, or copy the trace again.")
            if isinstance(data, dict) and "traceEvents" not in data:
                _of_a_trace(target, "a breakdown or a plan", session, program)
                if "program_key" in data:  # a plan
                    data = data.get("breakdown", {})
                    if data is None:
                        raise TomatError(f"{target} is the plan of a step that does not fit; it has no breakdown.")
                return Breakdown.from_dict(data, target)
    trace = load_trace(profile_place(target), session=session)
    return breakdown_from_trace(trace, device_kind=device_kind, program=program)


def _of_a_trace(target: str, what: str, session: str | None, program: str | None) -> None:
    """Refuse what only a trace has, asked of something else."""
    for flag, value in (("--session", session), ("--program", program)):
        if value is not None:
            raise TomatError(f"{target} is {what}, and {flag} {value} is for a trace; leave it out.")


def profile_place(target: str) -> str:
    """Where the profile of `target` is: `profiler/` inside a run's folder, else `target` itself."""
    path = Path(target)
    if "://" not in target and (path / PROFILER_FOLDER).is_dir():
        return str(path / PROFILER_FOLDER)
    return target
