"""The four falsifiers of Online Subspace Projection."""
