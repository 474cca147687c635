"""Tiers for what cannot be repaired in place."""
