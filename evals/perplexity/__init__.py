"""Text that is scored in blocks through compressed caches."""
