"""How far the attention outputs of compressed caches are from the full cache's, layer by layer."""
