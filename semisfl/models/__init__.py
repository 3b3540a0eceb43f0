"""Models that are cut in two, layer by layer."""
