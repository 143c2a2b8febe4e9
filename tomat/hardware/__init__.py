"""TPU chips and slices, floating-point operations of a step, and MFU."""
