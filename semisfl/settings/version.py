"""The package's version, written into every run directory and model file."""

VERSION = "0.2.0"
