"""The command line: every verb, and the pages that a run writes at its end."""
