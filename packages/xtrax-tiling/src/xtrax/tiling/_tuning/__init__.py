"""Chunk sizes that are timed: how, and where the figures are kept."""
