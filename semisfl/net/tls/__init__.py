"""Certificates: issued, read, revoked."""
