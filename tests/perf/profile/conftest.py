"""Profiles that several tests read: a program compiled for v6e, a TPU trace built of it, a real CPU trace."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
from trace_builder import BUILT_HOST, START_UNIX_NS, build_xspace, serialise_program

from tomat.perf.profile.breakdown import Roofs
from tomat.perf.profile.hlo import HloProgram, Instruction
from tomat.perf.profile.hlo_files import load_program
from tomat.perf.profile.program_breakdown import compiler_seconds
from tomat.perf.profile.protos import new_message

PROFILES = Path(__file__).parents[2] / "fixtures" / "profiles"
V6E = "TPU v6 lite"
V6E_IN_TRACES = "TPU v6 Lite"
"""What libtpu's profiler calls it."""
KERNEL_SECONDS = 20e-6
"""What the fixture gives a Pallas kernel: no TPU ever timed it."""
SHORTEST_SECONDS = 50e-9
"""No operation of a real trace takes no time."""


@pytest.fixture(scope="session")
def v6e_program() -> HloProgram:
    return load_program(PROFILES / "v6e_step.hlo.pb.gz")


@pytest.fixture(scope="session")
def v6e_seconds(v6e_program: HloProgram) -> Callable[[Instruction], float]:
    """What the fixtures say a kernel takes: the compiler's estimate, a fixed time where there is none."""
    roofs = Roofs.of_device_kind(V6E)

    def seconds(instruction: Instruction) -> float:
        known = compiler_seconds(v6e_program, instruction, roofs)
        return KERNEL_SECONDS if known is None else max(known, SHORTEST_SECONDS)

    return seconds


@pytest.fixture(scope="session")
def tpu_bytes(v6e_program: HloProgram, v6e_seconds):
    """Builds the xplane bytes of one host: `tpu_bytes(first_device=2, n_steps=4, ...)`."""
    whole = serialise_program(v6e_program)

    def build(
        *,
        first_device: int = 0,
        n_devices: int = 2,
        n_steps: int = 4,
        device_skew: float = 0.0,
        device_kind: str = V6E_IN_TRACES,
        hostname: str = BUILT_HOST,
        start_unix_ns: int = START_UNIX_NS,
        hlo_proto: bytes | None = whole,
    ) -> bytes:
        space = new_message("XSpace")
        for ordinal in range(first_device, first_device + n_devices):
            slow = 1 + device_skew * ordinal  # each device is this much slower than the one before it

            def seconds(instruction: Instruction, slow: float = slow) -> float:
                return v6e_seconds(instruction) * slow

            one = new_message("XSpace")
            one.ParseFromString(build_xspace(v6e_program, device_kind, seconds, n_steps, hlo_proto))
            device = next(plane for plane in one.planes if plane.name.startswith("/device"))
            device.name, device.id = f"/device:TPU:{ordinal}", 100 + ordinal
            if ordinal == first_device:
                space.CopyFrom(one)
            else:
                space.planes.append(device)
        space.hostnames[0] = hostname
        for stat in next(plane for plane in space.planes if plane.name == "Task Environment").stats:
            stat.uint64_value += start_unix_ns - START_UNIX_NS
        return space.SerializeToString()

    return build


@pytest.fixture(scope="session")
def tpu_profile(tmp_path_factory, tpu_bytes) -> Path:
    """A profile directory of two hosts with two devices each."""
    root = tmp_path_factory.mktemp("tpu_profile")
    session = root / "plugins" / "profile" / "2026_01_01_00_00_00"
    session.mkdir(parents=True)
    for host in (0, 1):
        data = tpu_bytes(first_device=2 * host, hostname=f"host{host}", device_skew=0.01)
        (session / f"host{host}.xplane.pb").write_bytes(data)
    return root


def unpacked(folder: Path, name: str) -> Path:
    path = folder / "host0.xplane.pb"
    path.write_bytes(gzip.decompress((PROFILES / name).read_bytes()))
    return path


@pytest.fixture(scope="session")
def cpu_profile(tmp_path_factory) -> Path:
    """The real CPU trace, unpacked."""
    return unpacked(tmp_path_factory.mktemp("cpu_profile"), "cpu_step.xplane.pb.gz")


@pytest.fixture(scope="session")
def h100_profile(tmp_path_factory) -> Path:
    """The real trace of an H100, with cuDNN's attention, unpacked."""
    return unpacked(tmp_path_factory.mktemp("h100_profile"), "h100_step.xplane.pb.gz")


@pytest.fixture(scope="session")
def gpu_profile(tmp_path_factory) -> Path:
    """The real trace of an H200, unpacked."""
    return unpacked(tmp_path_factory.mktemp("gpu_profile"), "h200_step.xplane.pb.gz")
