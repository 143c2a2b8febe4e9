"""Model sizes with a name.

A preset is a plain mapping of model keys that lies beneath the `model:` of a YAML file and of the command line, and
this is the only place that states it. Parameter counts are for the vocabulary of 18,570 ids (16,384 density bins); the
tests count them from the built model.
"""

from typing import Any

from tomat.base.errors import TomatError

PRESETS = {
    # 3.4 M parameters, 4 heads of 32: small enough that two CPU cores train it in minutes.
    "demo": (128, 4, 4, 512),
    # 34.7 M parameters, 4 heads of 128.
    "30m": (512, 6, 4, 2048),
    # 220.4 M parameters, 16 heads of 64: the shape of the runs on v6e-16. Wider heads (8 of 128) do the same sums with
    # fewer attention steps: the compiler's estimate outside attention falls from 0.71 s to 0.51 s a step.
    "200m": (1024, 12, 16, 4096),
    # 1,065.7 M parameters, 16 heads of 128: the shape of the runs on v6e-32.
    "1b": (2048, 20, 16, 5632),
}
"""Preset name -> `hidden_dim`, `num_layers`, `num_heads`, `intermediate_dim`."""


def preset_model(name: str) -> dict[str, Any]:
    """Model keys, fields of Levanter's `LlamaConfig` and its relatives; each head has its own keys and values."""
    if name not in PRESETS:
        raise TomatError(f"preset is '{name}'; expected one of {', '.join(PRESETS)}.")
    hidden_dim, num_layers, num_heads, intermediate_dim = PRESETS[name]
    return {
        "hidden_dim": hidden_dim,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "intermediate_dim": intermediate_dim,
        "tie_word_embeddings": True,
        "rope": {"type": "llama3"},
    }
