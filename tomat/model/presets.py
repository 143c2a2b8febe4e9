"""Model sizes with a name.

A preset is a plain mapping of model keys that lies beneath the `model:` of a YAML file and of the command line, and
this is the only place that states it. Parameter counts are for the vocabulary of 18,570 ids (16,384 density bins); the
tests count them from the built model.
"""

from typing import Any

from tomat.base.errors import TomatError

PRESETS = {
    # 3.4 M parameters, 4 heads of 32: small enough that two CPU cores train it in minutes.
    "demo": {"hidden_dim": 128, "num_layers": 4, "num_heads": 4, "intermediate_dim": 512},
    # 34.7 M parameters, 4 heads of 128.
    "30m": {"hidden_dim": 512, "num_layers": 6, "num_heads": 4, "intermediate_dim": 2048},
    # 220.4 M parameters, 16 heads of 64: the shape of the runs on v6e-16. Wider heads (8 of 128) do the same sums with
    # fewer attention steps: the compiler's estimate outside attention falls from 0.71 s to 0.51 s a step.
    "200m": {"hidden_dim": 1024, "num_layers": 12, "num_heads": 16, "intermediate_dim": 4096},
    # 1,065.7 M parameters, 16 heads of 128: the shape of the runs on v6e-32.
    "1b": {"hidden_dim": 2048, "num_layers": 20, "num_heads": 16, "intermediate_dim": 5632},
}
"""Preset name -> model keys that differ between presets."""


def preset_model(name: str) -> dict[str, Any]:
    """Model keys, fields of Levanter's `LlamaConfig` and its relatives; each head has its own keys and values."""
    if name not in PRESETS:
        raise TomatError(f"preset is '{name}'; expected one of {', '.join(PRESETS)}.")
    own = PRESETS[name]
    return {**own, "num_kv_heads": own["num_heads"], "tie_word_embeddings": True, "rope": {"type": "llama3"}}
