"""SemiFL."""
