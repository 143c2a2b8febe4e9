"""Measures this machine's chip, tunes kernels with the TPU compiler, and starts processes for studies and the lab."""
