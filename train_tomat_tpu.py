"""Train on whatever devices are here: `python train_tomat_tpu.py --config_path configs/train/200m-v6e16.yaml`.

On a TPU VM, start it on every host of the slice. Without arguments it trains the demo on the embedded densities. The
same as `tomat train`; overrides follow as `--a.b value`.
"""

import sys
from pathlib import Path

from tomat.app.cli import main

DEMO_CONFIG = Path(__file__).parent / "configs" / "train" / "demo.yaml"

if __name__ == "__main__":
    arguments = sys.argv[1:]
    # A help request or a config of the user's own takes the demo's place.
    if not any(word.split("=")[0].replace("-", "_") in ("__config_path", "_h", "__help") for word in arguments):
        arguments = ["--config_path", str(DEMO_CONFIG), *arguments]
    sys.exit(main(["train", *arguments]))
