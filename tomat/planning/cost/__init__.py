"""What a compiled step costs: memory, cycles of each operation, collectives."""
