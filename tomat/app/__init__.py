"""The command line: every verb, and the pages that a run leaves."""
