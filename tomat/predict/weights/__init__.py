"""A trained model as one folder of a few files that predicts. The weights are whole or quantised."""
