"""How tokens are stored: a transform (none, a basis) and a storage."""
