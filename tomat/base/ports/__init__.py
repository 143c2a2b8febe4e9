"""Private names of dependencies, one module for each: what is used, of which version, and why there is no other way.

A test of each module fails on another version and says what to look at again. This is how a pin is moved.
"""
