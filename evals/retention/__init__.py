"""What a cache still knows: of many questions on one context, turn after turn, and after other text went through it."""
