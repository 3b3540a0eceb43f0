"""Certificates for mutual TLS: issued by a small authority, read, renewed and revoked."""
