"""What a run does before and after its training: the data of a folder, the evaluation of what was held out."""
