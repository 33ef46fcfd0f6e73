"""What stands for the tokens that were evicted."""
