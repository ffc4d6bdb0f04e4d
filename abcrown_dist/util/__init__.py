"""Helpers that know nothing of networks: errors, deadlines, numerics, memory."""
