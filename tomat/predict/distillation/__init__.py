"""A model in few bits learns from a teacher: what is trained, by which loss, and the folder that it becomes."""
