"""Electron densities on grids: reading, checking, writing, patches, and the embedded set of real densities.

Unless stated otherwise, `lattice` is float64 `[3, 3]`, rows a, b, c in A; `atomic_numbers` is `[n]`; `frac_coords` is
`[n, 3]`; `rho` is `[nx, ny, nz]` in e/Å³; `values` are the same as rho x V in electrons, as in files.
"""
