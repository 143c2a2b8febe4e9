"""Kernels timed on chips: their programs, compiled here, and the fit of the planner's parameters to their times."""
