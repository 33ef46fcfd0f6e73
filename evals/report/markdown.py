"""Tables as Markdown and as rows of cells."""

import math
from collections.abc import Mapping, Sequence

from lowrank_kv_jax.evals.report.perplexities import PerplexityEntry, PerplexitySection
from lowrank_kv_jax.evals.report.sections import Entry, Section
from lowrank_kv_jax.evals.report.statistics import FEW, Interval
from lowrank_kv_jax.evals.ruler.tasks import RULER_6


def markdown(sections: Sequence[Section | PerplexitySection]) -> str:
    """One table for each section, ready for a README."""
    return "\n".join(
        f"### {section.title}\n\n{table(*cells(section))}\n\n{legend(section)}\n" for section in sections
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    lines = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


SIZE_HEADS = ("stored", "bases apart", "nominal")
SIZES = ("Sizes: times smaller than a 16-bit full cache, from the bytes stored, from these without the bases that all "
         "requests share, and nominal, as papers count (each further token of a long prompt).")


def legend(section: Section | PerplexitySection) -> str:
    """What the columns mean."""
    if isinstance(section, PerplexitySection):
        tokens = max(sum(count for _, count in entry.windows.values()) for entry in section.entries)
        windows = max(len(entry.windows) for entry in section.entries)
        text = f"{tokens} tokens scored in {windows} windows. {SIZES} Brackets: 95% bootstrap intervals over windows"
        text += _too_narrow(windows)
        if any(math.isinf(entry.perplexity.mean) for entry in section.entries):
            text += "; inf: a window diverged"
    else:
        several = "s" if len(section.tasks) > 1 else ""
        text = (f"{section.samples} samples in {len(section.tasks)} task{several}. {SIZES} Scores 0-100; brackets: "
                f"95% bootstrap intervals{_too_narrow(section.samples)}")
    if section.baseline is None:
        return text + "."
    return text + f", paired for the difference to {section.baseline}; p: Wilcoxon signed-rank test."


def _too_narrow(samples: int) -> str:
    return f", too narrow of so few ({samples})" if samples < FEW else ""


def _perplexity_cells(section: PerplexitySection) -> tuple[list[str], list[list[str]]]:
    compared = section.baseline is not None and len(section.entries) > 1
    uneven = len({len(entry.windows) for entry in section.entries}) > 1  # a run that is not finished
    header = ["method", *(["windows"] if uneven else []), *SIZE_HEADS, "perplexity"]
    header += [f"nats per token vs {section.baseline}", "p"] if compared else []
    rows = []
    for entry in section.entries:
        row = [f"`{entry.method}`", *([str(len(entry.windows))] if uneven else [])]
        row += [*_sizes(entry), interval_text(entry.perplexity, digits=2)]
        row += [interval_text(entry.difference, sign=True, digits=3), _p(entry.p)] if compared else []
        rows.append(row)
    return header, rows


def cells(section: Section | PerplexitySection) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a section's table."""
    if isinstance(section, PerplexitySection):
        return _perplexity_cells(section)
    uneven = len({entry.samples for entry in section.entries}) > 1  # a run that is not finished
    compared = section.baseline is not None and len(section.entries) > 1
    six = set(RULER_6) < set(section.tasks)
    header = ["method", *(["samples"] if uneven else []), *SIZE_HEADS, "mean"]
    header += [f"vs {section.baseline}", "p"] if compared else []
    header += ["ruler-6"] if six else []
    header += list(section.tasks) if len(section.tasks) > 1 else []
    rows = []
    for entry in section.entries:
        row = [f"`{entry.method}`", *([str(entry.samples)] if uneven else [])]
        row += [*_sizes(entry), interval_text(entry.mean)]
        row += [interval_text(entry.difference, sign=True), _p(entry.p)] if compared else []
        row += [_ruler_6(entry)] if six else []
        row += [_number(entry.tasks.get(task)) for task in section.tasks] if len(section.tasks) > 1 else []
        rows.append(row)
    return header, rows


def interval_text(value: Interval | None, sign: bool = False, digits: int = 1) -> str:
    if value is None:
        return ""
    form = f"{'+' if sign else ''}.{digits}f"
    bounds = "" if value.low is None or value.high is None else f" [{value.low:{form}}, {value.high:{form}}]"
    return f"{value.mean:{form}}{bounds}"


def _ruler_6(entry: Entry) -> str:
    found: Mapping[str, float] = entry.tasks
    if not set(RULER_6) <= set(found):
        return ""
    return f"{sum(found[task] for task in RULER_6) / len(RULER_6):.1f}"


def _sizes(entry: Entry | PerplexityEntry) -> list[str]:
    """Under `SIZE_HEADS`."""
    ratios = (entry.smaller, entry.smaller_apart, entry.nominal_smaller)
    return ["" if ratio is None else f"{ratio:.2f}x" for ratio in ratios]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _p(value: float | None) -> str:
    return "" if value is None else "<0.001" if value < 0.001 else f"{value:.3f}"
