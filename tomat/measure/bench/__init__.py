"""Everything that measures tomat itself."""
