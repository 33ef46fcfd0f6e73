"""Attention kernels, one folder an op: `api.py` picks the backend, `reference.py` is XLA and the truth in tests."""
