"""Results as records: what they hold, how they are written, resumed and summed up."""
