"""Simulated attacks on a run: by a server that reads images, and by clients that poison the model."""
