"""Kernels that chips have timed: their programs compiled here, what the planner says of them, and what fits best."""
