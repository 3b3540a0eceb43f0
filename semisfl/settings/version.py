"""The package's version, written into every run directory and model file."""

VERSION = "1.0.0"
