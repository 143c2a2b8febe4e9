import math

import pytest

from tomat.base.errors import TomatError
from tomat.model.loss.config import LOSS_KINDS, LossConfig


def test_default_is_the_soft_target_and_only_emd_warns():
    assert LossConfig().kind == "soft_cross_entropy"
    warned = [kind for kind in LOSS_KINDS if LossConfig(kind=kind).warning() is not None]
    assert warned == ["emd"]


LEVANTER = dict(kind="cross_entropy", vocabulary="full", kernel="levanter")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(kind="mse"), "'mse'; expected one of cross_entropy, soft_cross_entropy, ce_emd, emd, l1_mean, crps"),
        (dict(kernel="triton"), "'triton'"),
        (dict(target_sigma=0.0), "target_sigma is 0.0"),
        (dict(target_sigma=math.nan), "target_sigma is nan"),
        (dict(emd_weight=-1.0), "emd_weight is -1.0"),
        (dict(preamble_weight=math.inf), "preamble_weight is inf"),
        (dict(z_loss_weight=-1e-4), "z_loss_weight is -0.0001"),
        (dict(z_loss_weight=1e-4, kernel="pallas"), "loss.kernel: xla"),
        (dict(kind="crps", kernel="pallas"), "loss.kernel: xla"),
        (dict(block_positions=0), "block_positions is 0"),
        *(
            ({**LEVANTER, **change}, "loss.kernel levanter")
            for change in (dict(kind="ce_emd"), dict(vocabulary="density"), dict(preamble_weight=0.1))
        ),
    ],
)
def test_refuses(change, message):
    with pytest.raises(TomatError, match=message):
        LossConfig(**change)


def test_two_token_layouts_take_only_full_cross_entropy():
    LossConfig(kind="cross_entropy", vocabulary="full").check_layout(2)
    for config in (LossConfig(kind="cross_entropy"), LossConfig(kind="emd", vocabulary="full")):
        with pytest.raises(TomatError, match="2 tokens per voxel"):
            config.check_layout(2)
