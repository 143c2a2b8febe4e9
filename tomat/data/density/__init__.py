"""Electron densities on grids: read, written, patched, and the embedded set of real ones.

`grid.DensityGrid` is the density in e/Å³; `io.open_density` reads a CHGCAR, a `rho_gga` Zarr group or a Materials
Project document; `demo` holds the densities that come with the package.

Everywhere `lattice` is float64 `[3, 3]`, rows a, b, c in A; `atomic_numbers` `[n]`, `frac_coords` `[n, 3]`; `rho`
`[nx, ny, nz]` in e/Å³, and `values` the same as rho x V in electrons, as files have it, where nothing else is said.
"""
