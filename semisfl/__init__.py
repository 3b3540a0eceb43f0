"""Semi-supervised split federated learning: SemiSFL and its baselines."""

__version__ = "0.1.0"
