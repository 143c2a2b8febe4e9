"""Starts a run on machines that may be taken away: TPU VMs through gcloud or SkyPilot, or a Marin cluster (Iris)."""
