"""Write a shard set from many densities, the same as `tomat retokenize`: `python tokenize/retokenize.py --help`."""

import sys

from tomat.app.entry import main

if __name__ == "__main__":
    sys.exit(main(["retokenize", *sys.argv[1:]]))
