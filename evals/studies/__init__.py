"""Studies of the papers, one folder each."""
