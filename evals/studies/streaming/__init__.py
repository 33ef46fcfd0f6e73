"""What projections that learn while they run gain over static ones (StreamingKV, Palu)."""
