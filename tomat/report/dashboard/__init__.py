"""Runs of a folder or bucket in a browser of this machine, while they train: read and never written."""
