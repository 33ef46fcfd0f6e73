"""What eviction costs and saves, and what the moments of the evicted recover (MomentKV, OjaKV)."""
