"""abcrown_dist: a complete neural-network verifier for one device or many."""

__version__ = "0.1.0"
