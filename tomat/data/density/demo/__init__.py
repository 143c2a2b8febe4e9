"""The densities that come with the package."""
