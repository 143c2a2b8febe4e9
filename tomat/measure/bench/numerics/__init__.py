"""Variants of a configuration, trained over seeds: which learn the same."""
