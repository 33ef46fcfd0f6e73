"""What a model shows of its attention and what a cache answers: taps, rotary embeddings, partial outputs, their merge."""
