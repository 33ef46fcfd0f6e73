"""Calibration: a model's second moments over a corpus, and the bases that a method takes from them."""

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from lowrank_kv_jax.attention.spec import AttentionSpec, Taps
from lowrank_kv_jax.calibration import layer_votes, sensitivity
from lowrank_kv_jax.calibration.calibrator import Calibrator, fit_to
from lowrank_kv_jax.calibration.checkpoint_sums import CheckpointedSums
from lowrank_kv_jax.calibration.corpus import Corpus, load_corpus, token_windows
from lowrank_kv_jax.calibration.fisher import FisherSample, check_projections, collect_fisher
from lowrank_kv_jax.calibration.identifiers import SHARE, with_identifiers
from lowrank_kv_jax.calibration.needs import groups_read, groups_read_by_values
from lowrank_kv_jax.calibration.output_errors import collect_output_errors
from lowrank_kv_jax.calibration.refine import MOST_STEPS, check_refinable
from lowrank_kv_jax.calibration.refine import refine as refined
from lowrank_kv_jax.calibration.sampled import sampled_windows
from lowrank_kv_jax.calibration.taps import checked_windows, iterate_taps
from lowrank_kv_jax.checks.bounds import check_int
from lowrank_kv_jax.checks.models import check_model, weights_dtype
from lowrank_kv_jax.estimators.moments import Moments
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.methods.group_bases import check_ropes
from lowrank_kv_jax.methods.parse import as_method
from lowrank_kv_jax.progress import ProgressBar
from lowrank_kv_jax.storage.cache_dtype import floating

SAMPLED_TOKENS = 2
"""Tokens that the model writes for one of a corpus, where a method reads what it writes."""


def collect_moments(
    model: Any, tokens: Int[np.ndarray, "n S"], progress: bool = False, see: Callable[[int, Taps], None] | None = None,
    sums: CheckpointedSums | None = None, groups: Collection[tuple[int, ...]] = (),
    by_values: Collection[tuple[int, ...]] = (),
) -> Moments:
    """Second moments of every layer's queries, keys and values, summed over windows of tokens.

    The products of a window are taken in float32 on the device, windows are summed in float64 on the host.

    Args:
        model: a `LoadedModel`.
        tokens: int32 `[n, S]`.
        progress: show a progress bar.
        see: called with index and taps of every layer of every window, for what these moments do not hold.
        sums: goes on where a run that was killed left them; `see` is not called for the windows that it had finished.
        groups, by_values: adjacent layers of which `Moments.across` and `Moments.keys_by_values` are wanted.

    Returns:
        `Moments` of float64 arrays.

    Raises:
        ValueError: no tokens, windows beyond the model's context, ids outside of its vocabulary, or moments
            that are not finite (layer and tap are named).
    """
    config = model.config
    tokens = checked_windows(config, tokens)
    sums = sums or CheckpointedSums(None, {})
    begin = sums.load()
    tokens_seen = begin * tokens.shape[1]
    calibrator = Calibrator(config.attention, groups=groups, by_values=by_values, sums=sums, tokens=tokens_seen)
    with ProgressBar("calibrating", len(tokens) * config.num_layers, progress) as bar:
        bar.advance(begin * config.num_layers)

        def shown(window: np.ndarray) -> Iterator[Taps]:
            for layer, taps in enumerate(iterate_taps(config, model.params, window[None])):
                if see is not None:
                    see(layer, taps)
                yield taps
                bar.advance()

        for number, window in enumerate(tokens[begin:], begin + 1):
            calibrator.add(shown(window))
            sums.save(number)
    return calibrator.moments()


def calibrate(
    model: Any, method: Part | str, texts: Corpus | Sequence[str] | None = None, *, length: int = 2048,
    windows: int = 4, seed: int = 0, dtype: Any = jnp.bfloat16, progress: bool = False,
    resume: str | os.PathLike | None = None, refine: int = 0, fisher_length: int = FisherSample().length,
    fisher_sequences: int | None = None, keep: Callable[[tuple[Any, ...]], None] | None = None,
) -> tuple[Any, ...]:
    """Bases of a method for a model, fitted to texts.

    Args:
        model: a `LoadedModel`.
        method: what the bases are for, or its spec (see `parse_method`); one that needs none gets its
            `default_bases`, and the model does not run.
        texts: a corpus (see `load_corpus`) or documents; by default Python's own language reference.
        length, windows, seed: tokens of a window, and how many (see `token_windows`). No window is longer
            than the model's context.
        dtype: of the bases, bfloat16 by default: the dtype of the cache that is read with them.
        progress: show a progress bar.
        resume: prefix of two files in which finished windows are kept; a run that was killed goes on from them, and
            one that ends deletes them.
        refine: steps of Adam by which each group's bases are refined on these texts (see `calibration.refine`); for
            methods whose bases can be.
        fisher_length, fisher_sequences: tokens of a sequence whose gradient is one sample of Fisher information, and how
            many there are, by default all that the windows hold; for methods that read it (`rank_by=fisher`).
        keep: called with the bases before the files of `resume` are deleted, to save them: where it fails, these stay.

    Returns:
        One entry for each of the method's layer groups. Save it with `save_bases`.

    Raises:
        ValueError: the method does not suit the model, the corpus is too short, activations are not finite.
        TypeError: a dtype that is not floating, or that JAX would not hold (float64 without x64).
    """
    check_model(model)
    method, dtype = as_method(method), floating(dtype)  # now, not after minutes
    method.validate(model.config.attention)
    check_int("refine", refine, most=MOST_STEPS)
    if refine:
        check_refinable(method)
    if not method.calibrated:
        return method.default_bases(model.config.attention)
    corpus = texts if isinstance(texts, Corpus) else load_corpus() if texts is None else Corpus.of(texts)
    for name, value in (("length", length), ("windows", windows), ("seed", seed)):
        check_int(name, value, 0 if name == "seed" else 1)
    length = min(length, model.config.context)
    tokens = token_windows(model.tokenizer, corpus.texts, length, windows, seed)
    check_int("fisher_length", fisher_length, 2)
    sample = FisherSample(fisher_length, fisher_sequences)
    if fisher_sequences is not None:
        check_int("fisher_sequences", fisher_sequences, 1)
    if "fisher" in method.reads:
        sample.rows(tokens)
    held = _checkpoints(model, method, tokens, seed, resume, sample)
    moments = moments_for(model, [method], tokens, progress, held, seed, sample)
    bases = fit_bases(model, method, moments, dtype)
    if refine:
        bases = refined(model, method, bases, tokens, refine, seed=seed, progress=progress)
    if keep is not None:
        keep(bases)
    for sums in held:
        sums.discard()
    return bases


def moments_for(
    model: Any, methods: Sequence[Part], tokens: Int[np.ndarray, "n S"], progress: bool = False,
    sums: tuple[CheckpointedSums, ...] | None = None, seed: int = 0, fisher: FisherSample | None = None,
) -> Moments:
    """What the `fit` of all of these methods reads of a corpus (see `Part.reads`).

    Args:
        sums: of moments, of Fisher information and of moments of text that the model writes, to go on from; see
            `collect_moments`.
        seed: of that text.
        fisher: see `collect_fisher`.

    Raises:
        ValueError: a method that does not suit the model, before the model runs.
    """
    for method in methods:
        method.validate(model.config.attention)
        check_ropes(method, model.config.attention)
    tokens = checked_windows(model.config, tokens)
    of_moments, of_fisher, of_sampled = sums or (None, None, None)
    read = frozenset().union(*(method.reads for method in methods))
    if "fisher" in read:  # what is read last would be refused after minutes
        check_projections(model.params)
    if "sensitivity" in read:
        sensitivity.text_length(tokens.shape[1])
    if "votes" in read:
        layer_votes.text_length(model.config, tokens.shape[1])
    spec = model.config.attention
    wanted = {
        "groups": sorted({group for method in methods for group in groups_read(spec, method)}),
        "by_values": sorted({group for method in methods for group in groups_read_by_values(spec, method)}),
    }
    moments = Moments(tokens.size, *5 * [None])  # type: ignore[arg-type]
    if "moments" in read:
        moments = collect_moments(model, tokens, progress, sums=of_moments, **wanted)
    if "sampled" in read:
        written = sampled_windows(model, SAMPLED_TOKENS * tokens.size, seed, progress)
        written = with_identifiers(written, model.tokenizer, seed)
        sampled = collect_moments(model, written, progress, sums=of_sampled, **wanted)
        moments = moments._replace(sampled=sampled)
    if "fisher" in read:
        moments = moments._replace(fisher=collect_fisher(model, tokens, progress, of_fisher, fisher))
    if "outputs" in read:
        moments = moments._replace(outputs=collect_output_errors(model, moments, tokens, progress))
    if "votes" in read:
        moments = moments._replace(votes=layer_votes.collect_votes(model, tokens, progress))
    if "sensitivity" in read:
        moments = moments._replace(sensitivity=sensitivity.collect_sensitivity(model, tokens, progress))
    return moments


def serve(moments: Moments, method: Part, spec: AttentionSpec) -> bool:
    """Whether the method's `fit` finds all that it reads in these moments."""
    of_layers = [moments, moments.sampled] if "sampled" in method.reads and moments.sampled else [moments]
    groups, by_values = groups_read(spec, method), groups_read_by_values(spec, method)
    return method.reads <= moments.held and all(
        set(groups) <= set(own.across or ()) and set(by_values) <= set(own.keys_by_values or ()) for own in of_layers
    )


def _checkpoints(
    model: Any, method: Part, tokens: np.ndarray, seed: int, prefix: str | os.PathLike | None, fisher: FisherSample
):
    key: dict[str, Any] = {"fingerprint": getattr(model, "fingerprint", None), "weights": weights_dtype(model),
           "shape": list(tokens.shape), "sha256": hashlib.sha256(np.ascontiguousarray(tokens).tobytes()).hexdigest()}
    if groups := groups_read(model.config.attention, method):
        key["groups"] = [list(group) for group in groups]
    if by_values := groups_read_by_values(model.config.attention, method):
        key["by_values"] = [list(group) for group in by_values]
    # a short corpus has the same windows for every seed
    own = {"moments": {}, "fisher": fisher._asdict(), "sampled": {"seed": seed, "identifiers": SHARE}}
    return tuple(
        CheckpointedSums(None if prefix is None else f"{os.fspath(prefix)}.{kind}.npz", {"of": kind, **key, **more})
        for kind, more in own.items()
    )


def fit_bases(model: Any, method: Part, moments: Moments, dtype: Any = jnp.bfloat16) -> tuple[Any, ...]:
    """`method.fit` with floats in the given dtype: several methods can share the moments of one run of the model."""
    return fit_to(model.config.attention, method, moments, dtype)
