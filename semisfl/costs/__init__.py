"""Estimate the costs of training before a run, and compute them after it."""

PAPER_UP, PAPER_DOWN = "0.8-8", "10-20"
"""Mbit/s of the paper's testbed, whose connections vary between these limits."""
LATENCY, PROFILE = 5.0, "jetson-mix"
"""Assumptions about it: milliseconds per message, and the profile of its devices."""
