"""The decoder, its attention and its kernels."""
