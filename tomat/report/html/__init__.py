"""Pages of runs, plans, profiles, sweeps and predictions. Each is one HTML file that opens without a network."""
