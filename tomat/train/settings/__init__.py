"""The configuration of a run: every key, what it may be, and how files and words become one."""
