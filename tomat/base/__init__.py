"""What every room uses and what knows none of them: errors, console, files, overrides, storage that does not answer."""
