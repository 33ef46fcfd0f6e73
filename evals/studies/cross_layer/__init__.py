"""What the caches of different layers share (xKV, MiniCache), and what sharing a basis costs."""
