"""Arrays that declare themselves: cache states, positions, floats and fewer bits, bases, lanes, block reads."""
