"""Lowers and compiles programs for a TPU slice on a machine without one."""
