"""A trained model as one folder of a few files that predicts, whole or in few bits."""
