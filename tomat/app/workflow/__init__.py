"""The steps of a run before and after its training: the data of a folder, the evaluation of held-out materials."""
