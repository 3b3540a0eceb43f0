"""What training costs, before and after."""

PAPER_UP, PAPER_DOWN = "0.8-8", "10-20"
"""Mbit/s of the paper's testbed; between these, it says, its links fluctuate."""
