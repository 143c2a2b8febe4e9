"""Estimates whether a compiled program fits, and how long a chip takes for each of its kernels."""
