"""Private names of dependencies, a module for each: what is touched, with the version and why there is no other way.

A test of each module fails on another version, and says what to look at again: the way to move a pin.
"""
