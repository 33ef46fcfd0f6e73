"""KIVI's grouped rounding in float64."""

import numpy as np


def kivi_oracle(x, bits, tile):
    """Group by group in float64: (codes, error bound) of x ~ low + code * step."""
    batch, heads, size, channels = x.shape
    each = tile.channels or channels
    rebuilt, bound = np.zeros(x.shape), np.zeros(x.shape)
    for s in range(0, size, tile.tokens):
        for c in range(0, channels, each):
            group = (slice(None), slice(None), slice(s, s + tile.tokens), slice(c, c + each))
            part = np.asarray(x[group], np.float64)
            low, high = part.min((2, 3), keepdims=True), part.max((2, 3), keepdims=True)
            if bits == 8:
                step = np.maximum(np.abs(low), np.abs(high)) / 127
                rebuilt[group] = np.round(part / np.where(step > 0, step, 1)) * step
            else:
                step = (high - low) / (2**bits - 1)
                rebuilt[group] = low + np.round((part - low) / np.where(step > 0, step, 1)) * step
            # half a step, and what rounding low and step to bfloat16 adds to the step
            bound[group] = 0.5 * (1 + 2.0**-6) * step + 2.0**-7 * np.abs(low) / (2**bits - 1)
    return rebuilt, bound
