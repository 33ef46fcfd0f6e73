"""Where a basis comes from: decompositions of second moments, and rules that move a basis online."""
