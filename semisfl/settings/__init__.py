"""Everything that can be said about a run. Nothing here loads torch."""
