"""How good a trained model is: metrics, baselines, the teacher-forced diagnostic and its picture."""
