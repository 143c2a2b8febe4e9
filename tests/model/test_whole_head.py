"""The kernels that hold a head in VMEM: scores far apart, what is executed, and what they refuse."""

from collections import Counter

import numpy as np
import pytest
from attention_cases import heads, plain
from levanter.layers.attention import AttentionBackend

from tomat.base.errors import TomatError
from tomat.hardware.executed import attention_kernels
from tomat.model.decoder import DensityDecoderConfig
from tomat.model.splash import whole_head_attention
from tomat.model.tiles import WholeHeadConfig
from tomat.model.vmem import head_tiles

SMALL = WholeHeadConfig(256, 128, 256, 128, interpret=True)


def test_scores_far_apart_neither_overflow_nor_vanish():
    q, k, v = heads(1, 1, 256, 128)
    found = whole_head_attention(q * 20, k, v, SMALL, q_is_scaled=False)
    np.testing.assert_allclose(found.array, plain(q * 20, k, v).rearrange(q.axes).array, atol=1e-4)


def test_what_is_executed_is_what_the_kernels_visit():
    config = DensityDecoderConfig(
        max_seq_len=8192, hidden_dim=1024, num_heads=4, num_kv_heads=4, attn_backend=AttentionBackend.SPLASH,
        whole_head=WholeHeadConfig(),
    )  # fmt: skip
    kernels = attention_kernels(config, 8192, "tpu")
    visited = Counter[str]()
    for i in range(8):
        visited["forward"] += i * 1024 * 1024 + sum(512 * (above + 512) for above in (0, 512))
        visited["backward"] += i * 1024 * 1024 + sum(512 * (1024 - above) for above in (0, 512))
    assert kernels.forward.pairs(8192, None) == visited["forward"] and kernels.forward.n_matmuls == 2
    assert [(step.pairs(8192, None), step.n_matmuls) for step in kernels.backward] == [(visited["backward"], 5)]


def test_what_it_cannot_do_is_refused():
    for sizes, shape, message in (
        ({"rows": 100}, (512, 128, 2), "model.whole_head.rows is 100; expected a positive multiple of 128"),
        ({}, (8192, 64, 2), "got 8192 positions and heads of 64; leave it unset"),
        ({}, (32768, 256, 2), r"needs \d+ MiB of VMEM for 32768 positions and heads of 256"),
    ):
        with pytest.raises(TomatError, match=message):
            head_tiles(WholeHeadConfig(**sizes), *shape)
    with pytest.raises(TomatError, match=r"sliding_window is 512; its kernels have no window"):
        DensityDecoderConfig(whole_head=WholeHeadConfig(), sliding_window=512)
