"""What a training step needs on a TPU slice, found by compiling it where there is no TPU."""
