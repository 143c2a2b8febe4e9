"""Reads traces and compiled programs into a breakdown of one step."""
