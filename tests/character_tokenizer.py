"""A tokenizer for tests that need no vocabulary."""


class Encoded:
    """What a tokenizer returns."""

    def __init__(self, ids):
        self.input_ids = ids


class Characters:
    """A tokenizer of characters, with or without a token that opens a sequence."""

    def __init__(self, bos: int | None = None):
        self.bos_token_id = bos

    def __call__(self, text, add_special_tokens=True, verbose=True):
        opening = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return Encoded(opening + [ord(c) % 60 for c in text])
