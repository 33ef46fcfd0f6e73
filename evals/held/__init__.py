"""Which tokens of a prompt each layer holds, and how much of the attention falls on them."""
