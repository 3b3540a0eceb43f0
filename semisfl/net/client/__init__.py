"""A client's side of the network."""
