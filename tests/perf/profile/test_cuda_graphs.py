import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tomat.perf.profile.categories import Direction
from tomat.perf.profile.cuda_graphs import with_library_kernels
from tomat.perf.profile.trace import load_trace
from tomat.perf.profile.trace_breakdown import breakdown_from_trace
from tomat.perf.profile.trace_data import Trace

PACKED = Path(__file__).parents[2] / "fixtures" / "profiles" / "h100_step.xplane.pb.gz"


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Trace:
    """That of an H100, with cuDNN's attention."""
    path = tmp_path_factory.mktemp("h100") / "host0.xplane.pb"
    path.write_bytes(gzip.decompress(PACKED.read_bytes()))
    return load_trace(path)


def test_products_of_cublas_and_cudnn_in_cuda_graphs_are_those_of_the_model(trace):
    breakdown = breakdown_from_trace(trace)
    assert sum(op.seconds for op in breakdown.ops if op.program and op.flops is None) < 0.01 * breakdown.step_seconds
    attention = {op.direction: op for op in breakdown.ops if "dot_product_attention" in op.name}
    # 8 sequences of 8,192 tokens, 12 layers of 8 heads of 128
    pairs, heads = 8192 * 8193 // 2, 8 * 12 * 8
    for direction, products in ((Direction.FORWARD, 2), (Direction.BACKWARD, 5)):
        # Of the three kernels of the gradient one counts.
        assert attention[direction].occurrences == 12
        assert attention[direction].flops == products * 2 * 128 * heads * pairs
    # The reference is the executed work that MFU's HFU counts, but for cuDNN's tiles on the diagonal.
    tokens, width, ffn, vocabulary = 8 * 8192, 1024, 4096, 18570
    once = 12 * (4 * width**2 + 3 * width * ffn)
    again = 12 * 3 * width**2  # queries, keys and what attention yields are projected once more
    expected = 2 * tokens * (3 * once + again + 3 * width * vocabulary) + 7 * 2 * 128 * heads * pairs
    assert sum(op.flops or 0.0 for op in breakdown.ops) == pytest.approx(expected, rel=0.01)


def test_kernels_stay_as_they_are_where_their_number_is_not_that_of_the_calls(trace):
    device = trace.devices[0]
    run = next(one for one in device.modules if "train_step" in one.program)
    program = trace.program(run.program_id)
    assert program is not None
    kernels = [number for number, kind in enumerate(device.kinds) if kind.name.startswith("nvjet")]
    at = int(np.flatnonzero(np.isin(device.ops.kind, kernels) & (device.ops.start_ps >= run.start_ps))[0])
    ops = replace(device.ops, kind=np.delete(device.ops.kind, at), start_ps=np.delete(device.ops.start_ps, at))
    named = with_library_kernels(replace(device, ops=ops, modules=[run]), program).kinds[len(device.kinds) :]
    assert {kind.name.partition(".")[0] for kind in named} == {"dot_product_attention_fwd", "dot_product_attention_bwd"}
