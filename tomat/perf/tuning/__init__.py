"""Many plans: searches, sweeps, and the tiles of the loss."""
