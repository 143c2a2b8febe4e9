"""Performance: how fast a step is, how fast the chip could do it, and where the difference goes."""
