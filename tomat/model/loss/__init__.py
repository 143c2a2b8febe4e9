"""The loss on density tokens: what it is, and the two programs that compute it."""
