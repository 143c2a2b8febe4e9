"""Plans what a training step needs on a TPU slice, by compiling it on a machine without a TPU."""
