"""A run: how it starts, goes on, is kept and is read."""
