"""Densities as ids and back: Lloyd-Max bins, bins relative to the sum of atoms, two tokens per voxel."""
