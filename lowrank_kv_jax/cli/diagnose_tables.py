"""The tables of `lowrank-kv diagnose` on a terminal."""

from typing import Any

from lowrank_kv_jax.cli.tables import print_table

Rows = list[dict[str, Any]]
SIDES = {"k": "keys", "v": "values"}


def print_diagnostics(calibrated_on: str, shift: str, found: dict[str, Rows]) -> None:
    """Print the tables that were measured, by name.

    Args:
        calibrated_on: the text that bases were fitted to.
        shift: the texts of the forgetting table.
    """
    if "compressibility" in found:
        _print_compressibility(calibrated_on, found["compressibility"])
    for table, title in (("adaptation", "How bases follow the text: those with which each method reads"),
                         ("rest", "Adaptation on the rest: learned from the first half, measured on the second, of")):
        _print_adaptation(title, found.get(table, []))
    if "forgetting" in found:
        _print_forgetting(shift, found["forgetting"])
    if "spectra" in found:
        _print_spectra(calibrated_on, found["spectra"])
    if "refinement" in found:
        _print_refinement(calibrated_on, found["refinement"])


def _print_compressibility(calibrated_on: str, table: Rows) -> None:
    texts, lines = list(dict.fromkeys(row["text"] for row in table)), []
    for kind in dict.fromkeys(row["kind"] for row in table):
        rows = [row for row in table if row["kind"] == kind]
        cells = [_number(row[column]) for row in rows for column in ("static", "oracle")]
        lines.append((kind, f"{rows[0]['rank']}/{rows[0]['width']}", *cells))
    print_table(f"How compressible the cache is: RER, bases fitted to {calibrated_on}",
                ("what", "rank", *(f"{text}\n{kind}" for text in texts for kind in ("fitted", "oracle"))), lines)


def _print_adaptation(title: str, table: Rows) -> None:
    for text in dict.fromkeys(row["text"] for row in table):
        lines = []
        for row in sorted((row for row in table if row["text"] == text), key=lambda row: row["side"]):
            metrics = ("rer", "oracle_rer", "overlap", "cosine", "logit_error")
            lines.append((SIDES[row["side"]], row["method"], f"{row['rank']}/{row['width']}",
                          *(_number(row[metric]) for metric in metrics)))
        header = ("", "method", "rank", "RER", "oracle's", "overlap", "cosine", "logits")
        print_table(f"{title} {text}", header, lines, texts=2)


def _print_forgetting(shift: str, table: Rows) -> None:
    points = list(dict.fromkeys(row["refreshes"] for row in table))
    for of, name in (("prompt", "the prompt"), ("later", "the text since")):
        lines = []
        for metric, label in (("rer_k", "keys, RER"), ("rer_v", "values, RER"), ("logit_error", "logits")):
            for method in dict.fromkeys(row["method"] for row in table):
                by_point = {row["refreshes"]: row[metric] for row in table if (row["method"], row["of"]) == (method, of)}
                lines.append((label, method, *(_number(by_point[point]) for point in points)))
        title = f"Forgetting, {shift}: {name} after so many refreshes of 32 tokens"
        print_table(title, ("", "method", *map(str, points)), lines, texts=2)


def _print_spectra(calibrated_on: str, table: Rows) -> None:
    lines = []
    for row in table:
        flat = [[rank for layer in ranks for rank in layer] for ranks in row["ranks"].values()]
        lines.append((f"{row['tap']} (of {row['width']})",
                      *(f"{sum(ranks) / len(ranks):.1f}, {max(ranks)}" for ranks in flat)))
    print_table(f"Ranks that hold a share of the energy on {calibrated_on}: mean over heads, largest",
                ("tap", *(f"{float(energy):.0%}" for energy in table[0]["ranks"])), lines)


def _print_refinement(calibrated_on: str, table: Rows) -> None:
    for text in dict.fromkeys(row["text"] for row in table):
        rows = [row for row in table if row["text"] == text]
        lines = [(row["method"], row["learnt"], *(_number(row[name]) for name in ("output_error", "divergence")),
                  f"{row['perplexity']:.3f}") for row in rows]
        title = f"Refined on {calibrated_on}, measured on {text} (full: perplexity {rows[0]['full_perplexity']:.3f})"
        print_table(title, ("method", "refined", "outputs", "divergence", "perplexity"), lines, texts=2)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if value < 0.1 else f"{value:.3f}"
