"""Starting a run on machines that may be taken away: TPU VMs through gcloud, or a Marin cluster through Iris."""
