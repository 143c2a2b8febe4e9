"""The pages of breakdowns, and the index of all pages."""
