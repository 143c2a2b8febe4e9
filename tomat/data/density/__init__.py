"""Electron densities on grids: read, written, patched, and the embedded set of real ones.

Everywhere `lattice` is float64 `[3, 3]`, rows a, b, c in A; `atomic_numbers` `[n]`, `frac_coords` `[n, 3]`; `rho` `[nx,
ny, nz]` in e/Å³, and `values` the same as rho x V in electrons, as files have it, where nothing else is said.
"""
