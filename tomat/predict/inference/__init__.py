"""From a structure to a density: predictors, the structures they read, the files they write."""
