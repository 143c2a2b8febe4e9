"""Re-tokenizing many materials: survey, fit, write, on a laptop or a cluster."""
