"""Budgets of layers that shrink with depth (Cai et al., 2024, "PyramidKV"), as in KVCache-Factory."""


def layer_budget(budget: int, length: int, layer: int, layers: int, beta: int = 20) -> int:
    """Tokens that a layer keeps beside its window.

    Args:
        budget: tokens a layer keeps on average, B.
        length: most tokens that a layer can keep.
        layer, layers: index and number of layers.
        beta: the top layer keeps B // beta.
    """
    least = budget // beta
    most = 2 * budget - least
    if most >= length:
        most, least = length, 2 * budget - length
    return most - layer * ((most - least) // max(layers - 1, 1))


def kvpress_layer_budget(budget: int, length: int, window: int, layer: int, layers: int, beta: int = 20) -> int:
    """Tokens that a layer keeps, its window included, as kvpress divides them: in fractions, flat where it is too flat.

    Args:
        budget: tokens that a layer keeps on average, the window included.
        length: of the prompt.
        window: of the observation.
    """
    least = budget / beta
    most = 2 * budget - least
    if most >= length - window:
        most, least = length - window, 2 * budget - (length - window)
    if not length >= most >= least >= window:
        return max(1, budget)
    return round(most - layer * (most - least) / max(layers - 1, 1))
