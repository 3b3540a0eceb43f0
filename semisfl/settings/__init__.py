"""The settings of a run, and the catalog of everything they can name. Nothing here loads torch."""
