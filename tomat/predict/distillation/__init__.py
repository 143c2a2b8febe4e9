"""Distillation of a quantised model from a teacher: the trained arrays, the loss, and the folder that results."""
