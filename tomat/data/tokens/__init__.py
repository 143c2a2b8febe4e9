"""Sequences of tokens: the vocabulary, the layouts of a sequence, and the data set on disk."""
