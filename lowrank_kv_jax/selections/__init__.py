"""Which tokens stay."""
