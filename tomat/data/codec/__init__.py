"""Densities as ids and back: Lloyd-Max bins, two tokens a voxel, fractional coordinates."""
