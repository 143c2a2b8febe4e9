"""The training step, lowered and compiled for a TPU slice on a machine without one."""
