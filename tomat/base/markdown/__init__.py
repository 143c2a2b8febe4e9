"""Documents whose figures stand between markers, and Markdown tables."""
