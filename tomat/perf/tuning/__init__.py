"""Tuning by many plans: searches, sweeps, and tiles of the loss and attention kernels."""
