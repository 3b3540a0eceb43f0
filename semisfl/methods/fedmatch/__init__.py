"""FedMatch."""
