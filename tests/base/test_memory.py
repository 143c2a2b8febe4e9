import subprocess
import sys

import psutil

from tomat.base.memory import peak_memory_bytes

HELD = 300 * 2**20
CHILD = "import sys, psutil; from tomat.base.memory import *; held = bytearray(int(sys.argv[1])); del held; "
CHILD += "print(peak_memory_bytes(), psutil.Process().memory_info().rss)"
PARENT = "import subprocess, sys; held = bytearray(int(sys.argv[1])); "
PARENT += "print(subprocess.run([sys.executable, '-c', *sys.argv[2:]], capture_output=True, text=True).stdout)"


def figures_of_a_child(parent_bytes, child_bytes):
    words = [sys.executable, "-c", PARENT, str(parent_bytes), CHILD, str(child_bytes)]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return [int(word) for word in printed.split()]


def test_the_peak_is_what_was_held_though_it_was_given_back():
    peak, now = figures_of_a_child(0, HELD)
    empty, _ = figures_of_a_child(0, 0)
    assert HELD < peak < HELD + 1.2 * empty
    assert now < HELD


def test_the_peak_of_a_child_is_not_that_of_its_parent():
    """`ru_maxrss` of the child is the parent's 300 MiB."""
    alone, _ = figures_of_a_child(0, 0)
    child, _ = figures_of_a_child(HELD, 0)
    assert child < 1.2 * alone < HELD


def test_the_peak_is_not_below_what_is_held():
    assert 0 < psutil.Process().memory_info().rss <= peak_memory_bytes()
