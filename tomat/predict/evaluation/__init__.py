"""Evaluation of a trained model: metrics, baselines, teacher-forced and free-running errors, and pictures."""
