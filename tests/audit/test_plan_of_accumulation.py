"""A4: accumulation puts the scan of the layers into a loop over microbatches; the mask of attention is behind both."""

from pathlib import Path

import pytest

from tomat.perf.plan.compile.topology import planned_slice
from tomat.perf.plan.plan import Plan, make_plan
from tomat.train.settings.config import load_config

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: uv sync --extra plan")

SMALL = [
    "--preset", "demo", "--data.source", "embedded", "--data.layout", "v3-p7", "--data.n_density_tokens", "256",
    "--model.num_layers", "2", "--model.hidden_dim", "128", "--model.intermediate_dim", "128", "--model.num_heads", "1",
    "--model.num_kv_heads", "1", "--model.head_dim", "128", "--data.seq_len", "512", "--trainer.train_batch_size", "8",
    "--model.attn_backend", "splash",
    "--model.splash", "{block_q: 128, block_kv: 128, block_q_dkv: 128, block_kv_dkv: 128, use_fused_bwd: true}",
    "--run_name", "small",
]  # fmt: skip
CAUSAL_SHARE = 10 / 16
"""Of 4 x 4 blocks of 128 positions, those on or below the diagonal."""


@pytest.fixture(scope="module")
def plans(tmp_path_factory) -> dict[str, Plan]:
    """The small step with its two sequences of a device at once, and one after the other."""
    cache: Path = tmp_path_factory.mktemp("plan-cache")
    made = {}
    for name, words in (("whole", []), ("accumulated", ["--trainer.per_device_parallelism", "1"])):
        config = load_config(None, [*SMALL, *words])
        made[name] = make_plan(config, planned_slice(config, "v6e-4"), cache_dir=cache)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("name", "microbatches"), [("whole", 1), ("accumulated", 2)])
def test_a_causal_kernel_is_planned_by_its_active_blocks(plans, figure, name, microbatches):
    kernels = [row for row in plans[name].pallas_kernels() if "splash" in row["name"]]
    shares = sorted({row["active_grid_share"] for row in kernels})
    figure(
        "A4", f"share of the blocks counted of causal attention, 4 x 4 blocks, {name} (true: {CAUSAL_SHARE})", shares
    )
    assert shares == [CAUSAL_SHARE]
    # 2 layers, forward and backward, in each microbatch
    assert {row["executions"] for row in kernels} == {2.0 * microbatches}
    assert plans[name].to_dict()["assumed"] == []
