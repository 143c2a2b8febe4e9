"""What a decoder keeps of its forward pass for the backward pass, by name: values of `model.gradient_checkpointing`.

A policy is Haliax's `ScanCheckpointPolicy`. One added here is a value of the configuration and of `tomat plan
--policies`; `tests/hardware/test_flops.py` checks that tomat counts the same FLOPs for it as XLA does.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from haliax.nn.scan import ScanCheckpointPolicy

from tomat.base.errors import TomatError

QKV = "qkv"
"""Name, for checkpoint policies, of queries, keys and values, after normalisation and rotary embedding."""
ATTENTION_OUTPUT = "attention_output"
"""Name of the attention output before its projection, and of the log-sum-exp of each row of scores."""
ATTENTION_PROJECTION = "attention_projection"
"""Name of what the output projection gives, before it is added to the residual stream."""
MLP_PROJECTIONS = "mlp_projections"
"""Name of what the two input projections of the MLP give."""


NAMED_POLICIES: Mapping[str, ScanCheckpointPolicy] = {
    # Everything the backward pass needs is kept; nothing is computed twice.
    "off": ScanCheckpointPolicy(disable=True),
    # Only the input of each layer is kept; the layer is computed again.
    "full": ScanCheckpointPolicy(simple=True),
    # As full, and the output of attention with its log-sum-exp is kept: the attention kernel runs forward once
    # (vanilla attention still computes its scores twice).
    "save_attention": ScanCheckpointPolicy(save_block_internals=[ATTENTION_OUTPUT]),
    # As full, and queries, keys and values are kept as attention takes them: their projections, norms and rotary
    # embedding run once. With use_qk_norm only the values gain: the gradient of a norm needs its input, so queries and
    # keys are projected again.
    "save_qkv": ScanCheckpointPolicy(save_block_internals=[QKV]),
    # save_qkv and save_attention together: the output projection, the MLP and the norms are computed again, with
    # use_qk_norm also queries and keys.
    "save_qkv_attention": ScanCheckpointPolicy(save_block_internals=[QKV, ATTENTION_OUTPUT]),
    # save_attention, and what the MLP's two input projections give is kept: the attention projections, norms and
    # activations are computed again. 4 x intermediate_dim bytes a token and layer in bfloat16.
    "save_attention_mlp": ScanCheckpointPolicy(save_block_internals=[ATTENTION_OUTPUT, MLP_PROJECTIONS]),
    # save_qkv_attention and save_attention_mlp together.
    "save_matmuls": ScanCheckpointPolicy(save_block_internals=[QKV, ATTENTION_OUTPUT, MLP_PROJECTIONS]),
    # As full, with the input of each layer moved to host memory until the backward pass.
    "offload": ScanCheckpointPolicy(save_carries="offload"),
    # As full in two levels: the input of every sqrt(layers)-th layer is kept, and layers are computed up to three
    # times (with scan_layers; unrolled layers: as full).
    "nested": ScanCheckpointPolicy(nested=True, simple=True),
}
"""Values of `model.gradient_checkpointing` beside true (full), false (off) and a whole `ScanCheckpointPolicy`."""


PolicyName = Literal[
    "off", "full", "save_attention", "save_qkv", "save_qkv_attention", "save_attention_mlp", "save_matmuls", "offload",
    "nested",
]  # fmt: skip
"""The keys of `NAMED_POLICIES`. Haliax knows some of these names too, and means other policies by them."""


def chosen_policy(choice: bool | str | ScanCheckpointPolicy) -> ScanCheckpointPolicy:
    if isinstance(choice, ScanCheckpointPolicy):
        return choice
    name = choice if isinstance(choice, str) else "full" if choice else "off"
    if name not in NAMED_POLICIES:
        said = f"model.gradient_checkpointing is '{choice}'; expected true, false"
        raise TomatError(f"{said}, one of {', '.join(NAMED_POLICIES)}, or the fields of a ScanCheckpointPolicy.")
    return NAMED_POLICIES[name]


def keeps_mlp_projections(policy: ScanCheckpointPolicy) -> bool:
    """Whether `policy` keeps what the MLP's input projections give, on the device or in the host's memory."""
    internals = policy.save_block_internals
    names = [*policy.offload_block_internals, *(() if isinstance(internals, bool) else internals)]
    return policy.disable or internals is True or MLP_PROJECTIONS in names


def unrolled_policies(
    policy: ScanCheckpointPolicy, num_layers: int, save_mlp_layers: int
) -> list[ScanCheckpointPolicy]:
    """The policy of each unrolled layer: `policy`, with the MLP's projections kept too in the last `save_mlp_layers`
    layers. The backward pass frees what these keep first, before the gradients of the other layers are there."""
    # Without a scan around the layers XLA would otherwise merge a layer's recomputation with its first computation.
    policy = dataclasses.replace(policy, prevent_cse=True)
    internals = policy.save_block_internals
    kept = [*(() if isinstance(internals, bool) else internals), MLP_PROJECTIONS]
    more = dataclasses.replace(policy, simple=False, save_block_internals=kept)
    return [policy] * (num_layers - save_mlp_layers) + [more] * save_mlp_layers
