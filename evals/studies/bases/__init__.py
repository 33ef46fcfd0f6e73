"""How compressible caches are, where bases come from, and how they follow a shift of the text."""
