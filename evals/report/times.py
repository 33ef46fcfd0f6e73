"""Times of batches against the length of their contexts."""

from collections.abc import Sequence

import numpy as np

from lowrank_kv_jax.evals.report.sections import Section

Line = list[tuple[int, float]]


def times_by_rows(sections: Sequence[Section], field: str) -> dict[int | None, dict[str, Line]]:
    """Medians of a time over the batches of a method and a length, apart for batches of different sizes.

    Args:
        sections: of one benchmark.
        field: of the records, `ttft_s` or `decode_tokens_per_s`.

    Returns:
        By the rows of a batch (None where records do not say) and by method, lengths in tokens with medians, by length;
        batches of one length alone are left out.
    """
    found: dict[int | None, dict[str, dict[int, list[float]]]] = {}
    for section in sections:
        for record in section.records:
            own = record.get("timed_length") in (None, section.length)  # `compare` times one length for all records
            if record.get(field) is not None and isinstance(section.length, int) and own:
                lines = found.setdefault(record.get("rows"), {})
                lines.setdefault(record["method"], {}).setdefault(section.length, []).append(record[field])
    return {
        rows: {method: [(length, float(np.median(times))) for length, times in sorted(line.items())]
               for method, line in found[rows].items()}
        for rows in sorted(found, key=lambda rows: rows or 0)
        if len({length for line in found[rows].values() for length in line}) > 1
    }
