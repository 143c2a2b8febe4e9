"""The room that all others use and that uses none of them: errors, console, files, overrides, retries of storage."""
