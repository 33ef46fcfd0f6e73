"""Putting questions to caches: one exact prefill of a context serves all of its questions and all methods."""
