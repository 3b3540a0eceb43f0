"""Clients spread over the ranks of `torchrun`."""
