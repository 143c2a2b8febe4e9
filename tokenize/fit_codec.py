"""Fit a Lloyd-Max codec, the same as `tomat codec fit`: `python tokenize/fit_codec.py --help`."""

import sys

from tomat.app.entry import main

if __name__ == "__main__":
    sys.exit(main(["codec", "fit", *sys.argv[1:]]))
