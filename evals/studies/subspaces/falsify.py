"""The four falsifiers of Online Subspace Projection (section 11), run on a model, with a verdict for each."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lowrank_kv_jax.calibration.calibrate import fit_bases, iterate_taps
from lowrank_kv_jax.estimators.moments import Moments
from lowrank_kv_jax.evals.perplexity.score import score_many
from lowrank_kv_jax.evals.speed.roofline import white_bases
from lowrank_kv_jax.evals.studies.bases.metrics import rank_of_energy, second_moment
from lowrank_kv_jax.evals.studies.subspaces.prediction import CLAIMED, correlations, prompt_errors
from lowrank_kv_jax.evals.studies.subspaces.residuals import prompt_residuals
from lowrank_kv_jax.generation.forward import make_layout
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.method.accounting import cache_bytes, full_cache_bytes
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.saving.saved_cache import abstract_cache
from lowrank_kv_jax.storage.cache_dtype import default_cache_dtype

TOLERATED = 0.01  # relative increase of the perplexity, falsifier 1
FAITHFUL = 0.5  # least rank correlation of what predicts and what is predicted, falsifier 4
STEEP = 2.0  # times that the error may grow from the shortest to the longest context, falsifier 3


class Verdict(NamedTuple):
    """Of one falsifier.

    Attributes:
        claim: what would speak against the paper.
        falsified: whether it was seen.
        figures: rows of what was measured.
        summary: one line that says why.
    """

    claim: str
    falsified: bool
    figures: list[dict[str, Any]]
    summary: str


@dataclasses.dataclass(frozen=True)
class Texts:
    """Tokens `[n, S]` of each kind; a row of `shifted` is half prose, then code."""

    prose: np.ndarray
    code: np.ndarray
    shifted: np.ndarray


def shifted_texts(prose: np.ndarray, code: np.ndarray) -> Texts:
    """Texts of equal shape, and the one that turns from prose to code in its middle."""
    half = prose.shape[1] // 2
    return Texts(prose, code, np.concatenate([prose[:, :half], code[:, : prose.shape[1] - half]], axis=1))


class Run:
    """A model, its calibration and what every falsifier measures with."""

    def __init__(self, model: Any, moments: Moments, static: str, adaptive: str, dtype: str | None = None):
        self.model, self.moments, self.dtype = model, moments, dtype or default_cache_dtype()
        self.static, self.adaptive = static, adaptive

    def methods(self, ranks: Sequence[float], which: Sequence[str]) -> dict[tuple[str, float], Part]:
        specs = {"static": self.static, "adaptive": self.adaptive}
        return {(name, rank): parse_method(f"{_with(specs[name])}rank={rank}") for name in which for rank in ranks}

    def bases(self, method: Part) -> Any:
        if not method.calibrated:
            return None
        return fit_bases(self.model, method, self.moments, self.dtype)

    def row_bytes(self, method: Part, capacity: int) -> int:
        """All bytes of one row's cache, calibrated bases that it is read with included."""
        spec = self.model.config.attention
        layout = make_layout(self.model.config, 1, capacity, capacity, method.default_block, self.dtype)
        bases = white_bases(spec, method, self.dtype)
        return cache_bytes(abstract_cache(method, layout, bases), bases).total

    def adaptive_of_equal_bytes(self, static: Part, capacity: int) -> Part:
        """The adaptive variant of the largest rank whose cache is no larger than that of `static`.

        Raises:
            ValueError: not even rank 1 is.
        """
        most, spec = self.row_bytes(static, capacity), _with(self.adaptive)
        low, high = 0, self.model.config.head_dim
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.row_bytes(parse_method(f"{spec}rank={middle}"), capacity) <= most
            low, high = (middle, high) if fits else (low, middle - 1)
        if not low:
            raise ValueError(f"{self.adaptive}: takes more than the {most} bytes of {static} at any rank; "
                             "use a longer text")
        return parse_method(f"{spec}rank={low}")

    def break_even(self, rank: float, capacity: int) -> float:
        """Tokens from which on a chunk saves more than its basis takes, from the bytes of caches that differ in both."""
        one, two = (parse_method(f"{_with(self.adaptive)}rank={rank},chunks={n}") for n in (1, 2))
        basis = self.row_bytes(two, capacity) - self.row_bytes(one, capacity)
        half = capacity // 2
        per_token = (self.row_bytes(one, capacity) - self.row_bytes(one, half)) / (capacity - half)
        full = full_cache_bytes(self.model.config.attention, 1)
        return basis / (full - per_token) if full > per_token else float("inf")

    def nll(self, methods: Mapping[Any, Part], tokens: np.ndarray, scored: int) -> dict[Any, float]:
        """Mean negative log-likelihood of the last `scored` tokens of each row through each cache, and the full one."""
        methods = {"full": parse_method("full"), **methods}
        bases = {key: self.bases(method) for key, method in methods.items()}
        found = score_many(
            self.model, methods, tokens, tokens.shape[1] - scored, bases=bases, dtype=self.dtype
        )
        return {one.spec: float(one.perplexity.nll.mean()) for one in found}


def check_without_rank(option: str, spec: str, ranks: Sequence[float]) -> None:
    """Raise ValueError unless a spec takes a rank and gives none."""
    try:
        given = "rank=" in spec
        for rank in ranks:
            parse_method(spec if given else f"{_with(spec)}rank={rank}")
    except ValueError as error:
        raise ValueError(f"{option} {spec}, with a rank: {error}") from error
    if given:
        raise ValueError(f"{option} {spec}: must be without its rank, which --ranks and --rank give")


def _with(spec: str) -> str:
    return spec + ("," if ":" in spec else ":")


# ---- the falsifiers ---------------------------------------------------------------------------------------------


def no_rank_suffices(run: Run, texts: Texts, ranks: Sequence[float], scored: int) -> Verdict:
    """1: no rank well below d keeps the perplexity within 1% on all texts."""
    methods = run.methods(ranks, ("static", "adaptive"))
    figures, within = [], {}
    for text in ("prose", "code"):
        nll = run.nll(methods, getattr(texts, text), scored)
        for (name, rank) in methods:
            increase = float(np.expm1(nll[name, rank] - nll["full"]))
            figures.append({"text": text, "variant": name, "rank": rank, "perplexity": float(np.exp(nll[name, rank])),
                            "full": float(np.exp(nll["full"])), "increase": increase})
            within[name, rank] = within.get((name, rank), True) and increase <= TOLERATED
    enough = sorted(rank for (_, rank), good in within.items() if good and rank <= 0.5)
    summary = (f"rank {enough[0]:g} d keeps all texts within {TOLERATED:.0%}" if enough else
               f"no rank up to d / 2 keeps the perplexity within {TOLERATED:.0%} on all texts")
    return Verdict(f"no r << d (tried up to d / 2) costs at most {TOLERATED:.0%} perplexity on all texts", not enough,
                   figures, summary)


def adapting_is_worse(run: Run, texts: Texts, ranks: Sequence[float], scored: int) -> Verdict:
    """2: at equal rank the adaptive variant is worse than the static one after a shift of the text.

    Figures hold the adaptive variant at the bytes of the static one too: bases, sketches and indices included.
    """
    methods: dict[Any, Part] = dict(run.methods(ranks, ("static", "adaptive")))
    for rank in ranks:
        methods["equal bytes", rank] = run.adaptive_of_equal_bytes(methods["static", rank], texts.shifted.shape[1])
    nll = run.nll(methods, texts.shifted, scored)
    half = texts.shifted.shape[1] // 2
    figures, worse = [], []
    for (name, rank), method in methods.items():
        assert method.rebuilds
        bases = run.bases(method)
        left = prompt_residuals(run.model, method, texts.shifted[:, :-scored], bases, run.dtype)
        k, v = left.energy_ratio(half - method.sinks)
        columns, _ = method.ranks(run.model.config.attention)
        figures.append({
            "static rank": rank, "variant": name, "columns": columns,
            "bytes": run.row_bytes(method, texts.shifted.shape[1]), "rer_k": k, "rer_v": v,
            "perplexity": float(np.exp(nll[name, rank])), "full": float(np.exp(nll["full"])),
        })
        if name == "adaptive":
            worse.append(nll[name, rank] > nll["static", rank])
    full_bytes = full_cache_bytes(run.model.config.attention, texts.shifted.shape[1])
    figures = [row | {"of full": row["bytes"] / full_bytes} for row in figures]
    equal = sum(nll["equal bytes", rank] > nll["static", rank] for rank in ranks)
    return Verdict("the adaptive subspace is worse than the static one at equal rank", sum(worse) * 2 > len(worse),
                   figures, f"adaptive is worse after the shift at {sum(worse)} of {len(ranks)} ranks, "
                            f"at equal bytes at {equal} of {len(ranks)}; a chunk pays for its basis from "
                            f"{run.break_even(ranks[0], texts.shifted.shape[1]):.0f} tokens on (rank {ranks[0]:g})")


def error_grows_with_length(run: Run, texts: Texts, lengths: Sequence[int], rank: float, scored: int) -> Verdict:
    """3: the error grows sharply with the length of the context, in spite of the chunks."""
    methods = run.methods((rank,), ("adaptive",))
    (method,) = methods.values()
    assert method.rebuilds
    figures = []
    for length in lengths:
        tokens = texts.prose[:, -(length + scored) :]  # the same tokens are scored at every length
        nll = run.nll(methods, tokens, scored)
        k, v = prompt_residuals(run.model, method, tokens[:, :length], run.bases(method), run.dtype).energy_ratio()
        figures.append({"length": length, "increase": float(np.expm1(nll["adaptive", rank] - nll["full"])),
                        "rer_k": k, "rer_v": v})
    first, last = figures[0], figures[-1]
    steep = last["increase"] > STEEP * max(first["increase"], TOLERATED) or any(
        last[side] > STEEP * first[side] for side in ("rer_k", "rer_v")
    )
    summary = (f"perplexity +{first['increase']:.1%} at {lengths[0]} tokens, +{last['increase']:.1%} at {lengths[-1]}; "
               f"RER of values {first['rer_v']:.3f} and {last['rer_v']:.3f}")
    return Verdict(f"from {lengths[0]} to {lengths[-1]} tokens the error more than doubles", steep, figures, summary)


def bounds_predict_nothing(run: Run, tokens: np.ndarray, rank: float, queries: int = 16) -> Verdict:
    """4: neither the sketch's epsilon nor operator residuals predict the errors of logits and outputs, chunk by chunk.

    The variant's own sketches, at its own size and look-ahead, as each basis is taken from them. A chunk's errors are
    those of this chunk alone, all other tokens being exact.
    """
    (method,) = run.methods((rank,), ("adaptive",)).values()
    found = prompt_errors(run.model, method, tokens, run.bases(method), run.dtype, queries)
    figures = correlations(found)
    # what the paper claims: sketch and operator residuals predict both kinds of errors
    weakest = min((figures[i] for i in CLAIMED), key=lambda row: row["spearman"])
    chunks = found.used.sum(-1).mean()
    return Verdict(f"epsilon and operator residuals predict errors with a rank correlation below {FAITHFUL}",
                   weakest["spearman"] < FAITHFUL, figures,
                   f"weakest: {weakest['what']}, {weakest['spearman']:.2f} ({chunks:.0f} chunks a layer)")


# ---- thresholds and spectra -------------------------------------------------------------------------------------


def residual_thresholds(
    run: Run, tokens: np.ndarray, rank: float, percentile: float, decoding: bool = False
) -> tuple[float, float]:
    """tau_k and tau_v below which the mean relative residual of so many percent of all pages lies, worst head of each.

    They are those of the variant without thresholds, under its own look-ahead: all of it in a prompt, and while
    `decoding` as much of it as there are recent tokens.

    Raises:
        ValueError: a percentile outside of [0, 100], or texts shorter than a page.
    """
    if not 0 <= percentile <= 100:
        raise ValueError(f"percentile={percentile}: must lie in [0, 100]")
    (method,) = run.methods((rank,), ("adaptive",)).values()
    assert method.rebuilds
    page, known = getattr(method, "page", 1), {field.name for field in dataclasses.fields(method)}
    if "tau_k" in known:
        method = dataclasses.replace(method, tau_k=None, tau_v=None)
        if decoding:
            method = dataclasses.replace(method, lookahead=min(method.lookahead, method.recent))
    relative = prompt_residuals(run.model, method, tokens, run.bases(method), run.dtype).relative()
    whole = int(np.isfinite(relative[0][0, 0, 0]).sum()) // page * page
    if not whole:
        raise ValueError(f"texts of {tokens.shape[1]} tokens hold no page of {page} coded tokens")
    pages = (x[..., :whole].reshape(*x.shape[:-1], -1, page).mean(-1).max(2) for x in relative)
    k, v = (float(np.percentile(x, percentile)) for x in pages)
    return k, v


def spectra_by_chunk(model: Any, tokens: np.ndarray, chunk: int, energy: float = 0.9) -> list[dict[str, Any]]:
    """Ranks that hold a share of the energy, chunk by chunk and of the whole text, per layer and head.

    Returns:
        For keys after and before RoPE and values: "tap", "ranks" `[L][K][C]`, "whole" `[L][K]`.
    """
    found: dict[str, list[Any]] = {}
    for taps in iterate_taps(model.config, model.params, tokens[:1]):
        for tap in ("k", "k_pre", "v"):
            x = np.asarray(getattr(taps, tap)[0], np.float32).swapaxes(0, 1)
            whole = x.shape[1] // chunk * chunk
            parts = x[:, :whole].reshape(len(x), -1, chunk, x.shape[-1])
            ranks = rank_of_energy(second_moment(parts), energy), rank_of_energy(second_moment(x), energy)
            found.setdefault(tap, []).append(ranks)
    return [
        {"tap": tap, "ranks": [x.tolist() for x, _ in layers], "whole": [x.tolist() for _, x in layers]}
        for tap, layers in found.items()
    ]
