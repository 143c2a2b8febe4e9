"""Check a shard set, the same as `tomat shards verify`: `python tokenize/verify.py --help`."""

import sys

from tomat.app.entry import main

if __name__ == "__main__":
    sys.exit(main(["shards", "verify", *sys.argv[1:]]))
