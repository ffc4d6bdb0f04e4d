"""Ranks: who they are, and what they send each other. On one process everything here is a no-op."""
