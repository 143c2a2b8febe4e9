"""Traces and compiled programs, read into one breakdown of a step."""
