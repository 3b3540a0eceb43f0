"""Attacks on a run, simulated: what a server can learn, and what malicious clients can break."""
