"""The table of accelerator chips: peaks, memory, interconnect, clock, each row with its source.

A figure that no source gives is None. `chips.py` looks rows up and knows the slices.

Conventions: FLOP/s are dense (NVIDIA prints twice that, for 2:4 sparsity) and accumulate in float32 where the hardware
makes a difference. `ici_bytes_per_second` is the sum over a chip's links and over both directions, the way Cloud TPU
states it. GiB is 2**30 bytes.

The peaks of GPUs by type of operand were compared on 2026-11-26 with copies of NVIDIA's tables that others keep, named
in each row's source, since NVIDIA's own files were not at hand. All agreed, after peaks with sparsity were halved.
"""

from dataclasses import dataclass, replace
from typing import Literal

GIB = 2**30

Operand = Literal["bf16", "int8", "fp8", "f32"]
"""Type of the operands of a matrix product, as far as a chip's peak depends on it. float16 has the peak of bf16."""


@dataclass(frozen=True)
class Chip:
    """One accelerator chip (for a TPU: all its TensorCores; for a GPU: one device)."""

    name: str
    """Short name, as slice names use it."""
    device_kinds: tuple[str, ...]
    """What JAX calls it (`jax.Device.device_kind`), then other names; upper and lower case are the same.

    libtpu 0.0.46 writes names of its own into profiles: `TPU v4`, `TPU v5`, `TPU v5 Lite`, `TPU v6 Lite`, `TPU v7x`.
    """
    peak_bf16_flops_per_second: float
    """Dense bfloat16 matrix multiplication."""
    source: str
    peak_int8_ops_per_second: float | None = None
    """Dense int8 matrix multiplication summed in int32, multiplications and additions."""
    peak_fp8_flops_per_second: float | None = None
    """Dense matrix multiplication of 8-bit floating-point numbers."""
    peak_f32_flops_per_second: float | None = None
    """Dense matrix multiplication of float32 at XLA's default precision: TF32 on a GPU. None on a TPU, where that
    precision rounds to bf16 (https://docs.jax.dev/en/latest/jax.lax.html#jax.lax.Precision)."""
    hbm_bytes_usable: int | None = None
    """Memory that XLA lets a program have."""
    hbm_bytes_per_second: float | None = None
    ici_bytes_per_second: float | None = None
    """Interconnect between chips, all links, both directions (TPU)."""
    clock_hz: float | None = None
    """Clock at which the matrix units reach the peak."""
    mxu_shape: tuple[int, int] | None = None
    """Rows and columns of one matrix unit's systolic array (TPU)."""
    n_cores: int | None = None
    jax_devices_per_chip: int = 1
    """2 where JAX shows each TensorCore as a device of its own."""
    chips_per_host: int = 8
    """Chips that one machine of a slice of several machines has."""

    def peak_of(self, operand: Operand) -> float:
        """Peak of one JAX device for products of such operands, FLOP/s (for int8: operations a second).

        Where the table states no peak, it is the peak of bf16, to which XLA rounds or converts what a unit cannot
        multiply (int8 on TPU7x, fp8 before it). This is at least what the chip reaches.
        """
        stated = {
            "bf16": None,
            "int8": self.peak_int8_ops_per_second,
            "fp8": self.peak_fp8_flops_per_second,
            "f32": self.peak_f32_flops_per_second,
        }[operand]
        return (stated or self.peak_bf16_flops_per_second) / self.jax_devices_per_chip


_LIBTPU = "Usable memory: what libtpu 0.0.46 names as available in its out-of-memory error."
_HOPPER = "NVIDIA H100 Tensor Core GPU Architecture white paper (2022), table 3"
_A100_CHECKED = (
    "https://developer.nvidia.com/blog/nvidia-hopper-architecture-in-depth/, table 3, as quoted in NVIDIA's forum"
)
_H100_CHECKED = "https://glennklockwood.com/garden/processors/h100"
_B200_CHECKED = "https://glennklockwood.com/garden/processors/B200"
_GPUMAP = "https://github.com/lamonoai/gpumap, nvidia/GPU.md"

TPUS = (
    Chip(
        name="v4",
        device_kinds=("TPU v4",),
        peak_bf16_flops_per_second=275e12,
        peak_int8_ops_per_second=275e12,
        hbm_bytes_usable=int(2 * 15.25 * GIB),
        hbm_bytes_per_second=1200e9,
        ici_bytes_per_second=6 * 2 * 50e9,
        clock_hz=1.05e9,
        mxu_shape=(128, 128),
        n_cores=2,
        chips_per_host=4,
        source="https://cloud.google.com/tpu/docs/v4 (one peak for bf16 and int8, memory, MXUs); arXiv:2304.01433 "
        f"table 4 (1,050 MHz, 6 links of 50 GB/s each way). {_LIBTPU} It names 15.25 GiB for each TensorCore.",
    ),
    Chip(
        name="v5e",
        device_kinds=("TPU v5 lite", "TPU v5e"),
        peak_bf16_flops_per_second=197e12,
        peak_int8_ops_per_second=393e12,
        hbm_bytes_usable=int(15.75 * GIB),
        hbm_bytes_per_second=819e9,
        ici_bytes_per_second=400e9,
        clock_hz=1.5e9,
        mxu_shape=(128, 128),
        n_cores=1,
        chips_per_host=4,
        source="https://cloud.google.com/tpu/docs/v5e. The clock follows from the peak and 4 MXUs of 128 x 128: "
        f"197e12 / (4 * 128 * 128 * 2) = 1.50 GHz. {_LIBTPU}",
    ),
    Chip(
        name="v5p",
        device_kinds=("TPU v5", "TPU v5p"),
        peak_bf16_flops_per_second=459e12,
        peak_int8_ops_per_second=918e12,
        hbm_bytes_usable=int(95.73 * GIB),
        hbm_bytes_per_second=2765e9,
        ici_bytes_per_second=1200e9,
        clock_hz=1.75e9,
        mxu_shape=(128, 128),
        n_cores=2,
        chips_per_host=4,
        source="https://cloud.google.com/tpu/docs/v5p; int8: jax 0.11.1 `jax/_src/tpu_info.py`. The clock follows from "
        f"the peak and 8 MXUs of 128 x 128: 1.75 GHz. {_LIBTPU} (More than the 95 GiB of the data sheet, which says GB "
        "elsewhere and GiB here; jax's table has 103e9 bytes, 95.9 GiB.)",
    ),
    Chip(
        name="v6e",
        device_kinds=("TPU v6 lite", "TPU v6e"),
        peak_bf16_flops_per_second=918e12,
        peak_int8_ops_per_second=1836e12,
        hbm_bytes_usable=int(31.24 * GIB),
        hbm_bytes_per_second=1638e9,
        ici_bytes_per_second=800e9,
        clock_hz=1.75e9,
        mxu_shape=(256, 256),
        n_cores=1,
        chips_per_host=4,
        source="https://cloud.google.com/tpu/docs/v6e; bandwidth from the table of "
        "https://cloud.google.com/tpu/docs/tpu7x; 2 MXUs also in jax 0.11.1 `jax/_src/tpu_info.py`. The peak is 1.75 "
        f"GHz x 2 MXUs of 256 x 256 x 2 FLOP x 2 passes a cycle. {_LIBTPU} Real v6e pods said 31.25 GiB.",
    ),
    Chip(
        name="tpu7x",
        device_kinds=("TPU7x", "TPU v7x"),
        peak_bf16_flops_per_second=2307e12,
        peak_fp8_flops_per_second=4614e12,
        hbm_bytes_usable=int(2 * 94.74 * GIB),
        hbm_bytes_per_second=7380e9,
        ici_bytes_per_second=1200e9,
        clock_hz=2.2e9,
        mxu_shape=(256, 256),
        n_cores=2,
        jax_devices_per_chip=2,
        chips_per_host=4,
        source="https://cloud.google.com/tpu/docs/tpu7x (Ironwood): two TensorCores, each a JAX device, with half of "
        "the HBM. No clock is published; it follows from the peak and what jax 0.11.1 (`jax/_src/tpu_info.py`) says, 2 "
        "MXUs of 256 x 256 a core, with 2 passes a cycle as on v6e: 2307e12 / (2 * 2 * 256 * 256 * 2 * 2) = 2.20 GHz. "
        "Its page states fp8 and no int8, and that file says that int8 is not available. "
        f"{_LIBTPU} It names 94.74 GiB for each of the two TensorCores.",
    ),
)

_A100 = Chip(
    name="a100-40gb",
    device_kinds=("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
    peak_bf16_flops_per_second=312e12,
    peak_int8_ops_per_second=624e12,
    peak_f32_flops_per_second=156e12,
    hbm_bytes_per_second=1555e9,
    clock_hz=1.41e9,
    source=f"NVIDIA A100 Tensor Core GPU Architecture white paper (2020), tables 4 and 5; checked: {_A100_CHECKED}",
)
_H100 = Chip(
    name="h100",
    device_kinds=("NVIDIA H100 80GB HBM3",),
    peak_bf16_flops_per_second=989.4e12,
    peak_int8_ops_per_second=1978.9e12,
    peak_fp8_flops_per_second=1978.9e12,
    peak_f32_flops_per_second=494.7e12,
    hbm_bytes_per_second=3352e9,
    clock_hz=1.83e9,
    source=f"{_HOPPER}, H100 SXM5 (1,830 MHz is its boost clock for tensor cores); checked: {_H100_CHECKED}",
)

GPUS = (
    _A100,
    replace(
        _A100,
        name="a100-80gb",
        device_kinds=("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        hbm_bytes_per_second=2039e9,
        source=f"NVIDIA A100 data sheet (June 2021), A100 80GB SXM; checked: {_A100_CHECKED}",
    ),
    replace(
        _A100,
        name="a100-80gb-pcie",
        device_kinds=("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        hbm_bytes_per_second=1935e9,
        source=f"NVIDIA A100 data sheet (June 2021), A100 80GB PCIe; checked: {_A100_CHECKED}",
    ),
    _H100,
    Chip(
        name="h100-pcie",
        device_kinds=("NVIDIA H100 PCIe",),
        peak_bf16_flops_per_second=756e12,
        peak_int8_ops_per_second=1513e12,
        peak_fp8_flops_per_second=1513e12,
        peak_f32_flops_per_second=378e12,
        hbm_bytes_per_second=2039e9,
        clock_hz=1.62e9,
        source=f"{_HOPPER}, H100 PCIe (1,620 MHz is its boost clock for tensor cores); checked: {_GPUMAP}",
    ),
    replace(
        _H100,
        name="h200",
        device_kinds=("NVIDIA H200",),
        hbm_bytes_per_second=4800e9,
        clock_hz=None,
        source="NVIDIA H200 data sheet (2024), H200 SXM: the peaks of the H100 SXM with other memory; "
        f"checked: {_H100_CHECKED}, {_GPUMAP}",
    ),
    Chip(
        name="b200",
        device_kinds=("NVIDIA B200",),
        peak_bf16_flops_per_second=2250e12,
        peak_int8_ops_per_second=4500e12,
        peak_fp8_flops_per_second=4500e12,
        peak_f32_flops_per_second=1100e12,
        hbm_bytes_per_second=8000e9,
        source="NVIDIA Blackwell Architecture Technical Brief (2024), HGX B200 at 1,000 W (a later table has "
        f"7.7 TB/s); checked: {_B200_CHECKED}",
    ),
    Chip(
        name="gb200",
        device_kinds=("NVIDIA GB200",),
        peak_bf16_flops_per_second=2500e12,
        peak_int8_ops_per_second=5000e12,
        peak_fp8_flops_per_second=5000e12,
        peak_f32_flops_per_second=1250e12,
        hbm_bytes_per_second=8000e9,
        chips_per_host=4,
        source="NVIDIA Blackwell Architecture Technical Brief (2024), one GPU of GB200 NVL72; "
        f"checked: {_B200_CHECKED}",
    ),
    Chip(
        name="l4",
        device_kinds=("NVIDIA L4",),
        peak_bf16_flops_per_second=121e12,
        peak_int8_ops_per_second=242.5e12,
        peak_fp8_flops_per_second=242.5e12,
        peak_f32_flops_per_second=60e12,
        hbm_bytes_per_second=300e9,
        source=f"NVIDIA L4 data sheet (2023), halved for dense; checked: {_GPUMAP}",
    ),
    Chip(
        name="rtx-5090",
        device_kinds=("NVIDIA GeForce RTX 5090",),
        peak_bf16_flops_per_second=209.5e12,
        peak_int8_ops_per_second=838e12,
        peak_fp8_flops_per_second=419e12,
        peak_f32_flops_per_second=104.8e12,
        hbm_bytes_per_second=1792e9,
        clock_hz=2.407e9,
        source="NVIDIA RTX Blackwell GPU Architecture white paper (2025), appendix A; bf16 accumulates in float32, "
        f"which GeForce cards do at half the speed of float16, and fp8 at half that of int8; checked: {_GPUMAP}",
    ),
)
