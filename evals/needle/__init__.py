"""Needles in a haystack: how they are made, at every depth, and as long as was asked for."""
