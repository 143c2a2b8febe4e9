"""Train on whatever devices are here: `python train_tomat_tpu.py --config_path configs/train/200m-v6e16.yaml`.

On a TPU VM, start it on every host of the slice. Without arguments it trains the demo on the embedded densities. The
same as `tomat train`; overrides follow as `--a.b value`.
"""

import sys

from tomat.app.entry import interruptible

if __name__ == "__main__":
    with interruptible():
        from tomat.app.cli import main

        sys.exit(main(["train", *sys.argv[1:]]))
