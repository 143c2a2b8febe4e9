"""Electron densities on grids: read, written, patched, and the embedded set of real ones.

`grid.DensityGrid` is the density in e/A^3; `io.open_density` reads a CHGCAR, a `rho_gga` Zarr group or a Materials
Project document; `demo` holds the densities that come with the package.
"""
