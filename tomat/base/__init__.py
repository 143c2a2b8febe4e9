"""What every room uses and knows no other room: errors, console, files, overrides, storage that does not answer."""
