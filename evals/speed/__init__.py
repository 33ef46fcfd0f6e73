"""Time to first token, decode speed, the attention ops alone, and what hardware allows."""
