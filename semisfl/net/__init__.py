"""Training over a network: what both sides say, and one folder a side."""
