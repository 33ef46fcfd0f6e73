"""Caches and bases on disk."""
