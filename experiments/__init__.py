"""Experiments: named, reproducible runs that print tables and write records."""
