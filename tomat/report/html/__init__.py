"""Runs, plans, profiles, sweeps and predictions as one HTML file each, which opens from disk without a network."""
