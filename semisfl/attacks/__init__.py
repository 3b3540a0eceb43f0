"""What leaks and who can spoil it, simulated: attacks on a run's own clients and servers."""
