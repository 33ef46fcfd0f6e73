"""lm-eval on compressed caches: contexts are compressed, continuations are scored through the cache."""
