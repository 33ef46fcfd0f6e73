"""Which records of result files a report counts: what keeps them apart, and which of them belong together."""

import collections
import os
from collections.abc import Mapping, Sequence
from typing import Any

from lowrank_kv_jax.evals.results.fields import MOST, is_number
from lowrank_kv_jax.evals.results.records import read_records, warn
from lowrank_kv_jax.evals.ruler.tasks import GROUPS
from lowrank_kv_jax.method.layout import DEFAULT_BLOCK

Record = Mapping[str, Any]
Conditions = tuple[tuple[str, str], ...]

CONDITIONS = (
    "fingerprint", "style", "weights_dtype", "cache_dtype", "haystack", "source", "fewshot", "prefill_chunk", "shapes",
    "block", "turns", "between",
)
"""Fields that results share where they can be compared; those of `_OWN` are none, they are each method's own."""

_NUMBERS = (
    "cache_bytes", "shared_bytes", "full_cache_bytes", "bytes_per_token", "nominal_smaller", "ttft_s",
    "decode_tokens_per_s", "context_tokens",
)
_NAMES = ("command", "model", "protocol", "length", "step", "seed", "index", "depth")
"""Fields that records are sorted by."""
_ERRORS = ("eval outputs",)
"""Commands whose score is an error, of which less is better: no table or figure of a report is made for that."""
_DIGESTS = ("prompt_sha256", "document_sha256", "window_sha256")


def read_results(
    paths: Sequence[str | os.PathLike], tasks: Sequence[str] | None = None, where: Mapping[str, Any] | None = None
) -> tuple[list[Record], list[Record]]:
    """Records with a score, and records with a likelihood; one line on standard error says what a file has beside.

    A method that was calibrated on several texts, or ran with several blocks of its own, stands there as several, which
    name them.

    Args:
        tasks: only these, or groups of RULER's.
        where: fields, and what a record must hold in them.

    Raises:
        ValueError: nothing is left, or a task that no record has; OSError: no such file.
    """
    found: dict[str, list[Record]] = {"score": [], "nll": []}
    for path in paths:
        faults: collections.Counter[str] = collections.Counter()
        for record in read_records(path):
            kind = _kind(record)
            if kind is None or any(record.get(field) != value for field, value in (where or {}).items()):
                continue
            fault = _fault(record, kind)
            if fault is None:
                found[kind].append(record)
            else:
                faults[fault] += 1
        if faults:
            reasons = "; ".join(f"{count} with {fault}" for fault, count in faults.items())
            warn(f"{path}: records left out: {reasons}")
    several = _several(found["score"] + found["nll"])
    scored, likelihoods = ([_with_own(record, several) for record in found[kind]] for kind in ("score", "nll"))
    if not scored and not likelihoods:
        made = "".join(f", {field} {value!r}" for field, value in (where or {}).items())
        raise ValueError(f"no record with a score or a likelihood in {', '.join(map(str, paths))}{made}")
    if tasks is None:
        return scored, likelihoods
    wanted = _expand(tasks, {record["task"] for record in scored + likelihoods})
    return [r for r in scored if r["task"] in wanted], [r for r in likelihoods if r["task"] in wanted]


def conditions_of(record: Record, fields: Sequence[str] = CONDITIONS) -> Conditions:
    """What a record was made under, as text; digests are cut to 12 digits."""
    return tuple((field, _spell(record.get(field))) for field in fields)


def told_apart(titles: Sequence[str], conditions: Sequence[Conditions]) -> list[str]:
    """What tells each title from those that equal it: the conditions in which they differ."""
    out = []
    for title, own in zip(titles, conditions, strict=True):
        same = [set(other) for name, other in zip(titles, conditions, strict=True) if name == title]
        out.append(", ".join(f"{field} {text}" for field, text in own if any((field, text) not in s for s in same)))
    return out


def sample_of(record: Record) -> tuple[Any, ...]:
    """What names a sample within its task."""
    return tuple(record.get(field) for field in ("seed", "index", "depth"))


def latest(records: Sequence[Record]) -> list[Record]:
    """One record for each method, task and sample: the last; a line on standard error where it asks something else."""
    found: dict[tuple[Any, ...], Record] = {}
    other: collections.Counter[str] = collections.Counter()
    for record in records:
        key = record["method"], record["task"], sample_of(record)
        other[record["method"]] += key in found and not same_question(found[key], record)
        found[key] = record
    for method, count in other.items():
        if count:
            warn(f"{method}: records left out: {count}, whose tasks and samples stand again, later, with another prompt")
    return list(found.values())


def same_question(one: Record, other: Record) -> bool:
    """Whether two records of a sample are about the same text, as far as both say."""
    return all(one[field] == other[field] for field in _DIGESTS if one.get(field) and other.get(field))


def _calibration(record: Record) -> str | None:
    return _spell(record["calibration"]) if isinstance(record.get("calibration"), dict) else None


def _own_block(record: Record) -> str | None:
    """None where the run named a block for all methods: that is one of `CONDITIONS`."""
    return f"block {_spell(record.get('own_block') or DEFAULT_BLOCK)}" if record.get("block") is None else None


_OWN = (_calibration, _own_block)
"""What a method has of its own, as text; None where a record says nothing of it."""


def _several(records: Sequence[Record]) -> set[tuple[str, Any]]:
    """Methods, and what of `_OWN` they have several of."""
    found: dict[tuple[str, Any], set[str]] = {}
    for record in records:
        for own in _OWN:
            if (text := own(record)) is not None:
                found.setdefault((record["method"], own), set()).add(text)
    return {key for key, texts in found.items() if len(texts) > 1}


def _with_own(record: Record, several: set[tuple[str, Any]]) -> Record:
    texts = [text for own in _OWN if (record["method"], own) in several and (text := own(record)) is not None]
    return {**record, "method": f"{record['method']} [{', '.join(texts)}]"} if texts else record


def _kind(record: Record) -> str | None:
    """The field that makes a record a result."""
    if not (record.get("method") and record.get("task")) or record.get("command") in _ERRORS:
        return None
    if record.get("score") is not None:
        return "score"
    return "nll" if "nll" in record and record.get("scored_tokens") else None


def _fault(record: Record, kind: str) -> str | None:
    """Why a record cannot be counted. A likelihood may be null: it diverged."""
    if not (isinstance(record["method"], str) and isinstance(record["task"], str)):
        return "a method or a task that is no text"
    for field in _NAMES:
        value = record.get(field)
        if not (value is None or isinstance(value, str | bool) or is_number(value)):
            return f"a {field} that is no text, and no number of at most {MOST:g}"
    texts = all(isinstance(record.get(field), str) for field in ("command", "model"))
    if not texts or not isinstance(record.get("protocol"), str | None):
        return "a command, model or protocol that is no text"
    if not all(isinstance(record.get(field), str | None) for field in _DIGESTS):
        return "a sha256 that is no text"
    rows = record.get("rows")
    if not (rows is None or isinstance(rows, int) and is_number(rows)):
        return "rows that are no whole number"
    for field in (kind, *_NUMBERS):
        if record.get(field) is not None and not is_number(record[field]):
            return f"a {field} that is no finite number of at most {MOST:g}"
    if kind == "nll" and not (is_number(record["scored_tokens"]) and record["scored_tokens"] > 0):
        return "scored_tokens that are no number above 0"
    text = record.get("text")
    if kind == "nll" and (record.get("index") is None or not isinstance(text, dict)):
        return "a likelihood without the index of its window or the name of its text (older versions of `compare`)"
    if kind == "nll" and not all(isinstance(text.get(field), str | None) for field in ("name", "sha256")):
        return "a text whose name or sha256 is no text"
    return None


def _expand(tasks: Sequence[str], held: set[str]) -> set[str]:
    for name in tasks:
        if not held & set(GROUPS.get(name, (name,))):
            raise ValueError(f"no record has the task {name!r}, only {', '.join(sorted(held))}")
    return {task for name in tasks for task in GROUPS.get(name, (name,))}


def _spell(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(str(part)[:12] if name == "sha256" else str(part) for name, part in value.items())
    return "none" if value is None else str(value)
