"""Running a model through a compressed cache: prefill, extend, refresh, decoding loops, sampling."""
