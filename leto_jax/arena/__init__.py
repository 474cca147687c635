"""Retained memory: mapping it, looking at it, storing to it."""
