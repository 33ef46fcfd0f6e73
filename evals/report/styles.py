"""How methods look in all figures of a report."""

from collections.abc import Sequence

MARKERS = "osD^vP*Xh<>p8d"
MANY = 10  # with more methods, the settings of one share a colour, and tasks are a map instead of bars


def style(number: int, method: str) -> dict:
    """Colour and marker of a method."""
    color = "black" if method == "full" else f"C{number % 10}"
    # a peer's markers are hollow
    return {"color": color, "marker": MARKERS[number % len(MARKERS)], "markerfacecolor": "w" if "/" in method else color}


def legend(figure, labels: Sequence[str], axis=None) -> None:
    """Below the axes, in as many columns as the longest label allows; where all axes show the same, of one `axis`."""
    drawn = () if axis is None else axis.get_legend_handles_labels()
    columns = max(1, min(3, 72 // (max(map(len, labels)) + 6), len(labels)))
    figure.legend(*drawn, loc="outside lower center", ncols=columns, frameon=False)


def families(methods: Sequence[str]) -> dict[str, list[int]]:
    """Indices of the methods by what a figure shows as one: each by itself, or with many all settings of a method."""
    if len(methods) <= MANY:
        return {method: [i] for i, method in enumerate(methods)}
    found: dict[str, list[int]] = {}
    for i, method in enumerate(methods):
        name = "+".join(part.partition(":")[0] for part in method.split("+"))
        found.setdefault(name, []).append(i)
    return found
