"""Looking at runs where they lie, in a folder or a bucket, without starting JAX."""
