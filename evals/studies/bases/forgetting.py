"""What a cache still holds of its prompt when other text has gone through it, and how it codes that text."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.attention.taps import half_split
from lowrank_kv_jax.calibration.calibrate import iterate_taps
from lowrank_kv_jax.estimators.moments import Moments
from lowrank_kv_jax.evals.studies.bases.adapting import fitted_methods
from lowrank_kv_jax.evals.studies.bases.logit_error import logit_error
from lowrank_kv_jax.generation.forward import make_layout
from lowrank_kv_jax.generation.groups import compress_group, ingest_group
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.methods.parse import spell_method
from lowrank_kv_jax.progress import ProgressBar

BLOCK = 32
"""Tokens between two refreshes."""
REFRESHES = (0, 16, 32, 64, 96)


def forgetting_table(
    model: Any, calibration: Moments, prompt: np.ndarray, later: np.ndarray, methods: Sequence[str | Part],
    refreshes: Sequence[int] = REFRESHES, progress: bool = False,
) -> list[dict[str, Any]]:
    """What stored tokens are rebuilt as after so many refreshes of 32 tokens: the prompt's, and those that came since.

    Every layer's tokens are the model's own, of the whole text, so that errors of layers below are not among those of
    a basis. Tokens that a method keeps exact do not count. Everything is float32.

    Args:
        model: a `LoadedModel`.
        calibration: moments of the calibration corpus.
        prompt: int32 `[n, S]`.
        later: int32 `[n, T]`, what goes through the cache behind it; T of at least 32 for each refresh.
        methods: specs or methods that keep coefficients in bases.
        refreshes: after which to look.
        progress: show a progress bar.

    Returns:
        Rows of "method", "refreshes", "of" ("prompt" or "later"), and the means over layers, kv heads and windows
        "rer_k", "rer_v" and "logit_error" (each text's queries over its own keys, see `logit_error`); None where nothing
        is stored.

    Raises:
        ValueError: as `fitted_methods`; a later text that is too short.
    """
    if later.shape[1] < BLOCK * max(refreshes):
        raise ValueError(f"refreshes={max(refreshes)}: take {BLOCK * max(refreshes)} tokens; the text has "
                         f"{later.shape[1]}")
    later = later[:, : BLOCK * max(refreshes)]
    fitted, found = fitted_methods(model, calibration, methods, one_basis=False), {}
    size = prompt.shape[1] + later.shape[1]
    layout = make_layout(model.config, 1, prompt.shape[1], size, block=BLOCK, dtype=jnp.float32)
    with ProgressBar("forgetting", len(prompt) * model.config.num_layers * len(fitted), progress) as bar:
        for window in np.concatenate([prompt, later], axis=1):
            for layer, taps in enumerate(iterate_taps(model.config, model.params, window[None])):
                for index, (method, bases) in enumerate(fitted):
                    own = None if bases is None else bases[layer]
                    for at, store in _stores(method, layout.of_layer(layer), own, taps, refreshes):
                        for of, errors in _errors(method, layout.of_layer(layer), own, store, taps).items():
                            found.setdefault((index, at, of), []).append(errors)
                    bar.advance()
    return [_row(fitted[index][0], at, of, errors) for (index, at, of), errors in sorted(found.items())]


def _stores(method: Part, layout: Any, own: Any, taps: Taps, refreshes: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """The stores of a layer after each of `refreshes`."""
    taps = taps._replace(x=None)
    state = compress_group(method, layout, own, (taps.part(slice(0, layout.prompt)),), jnp.array([layout.prompt]))
    for at in range(max(refreshes) + 1):
        if at:
            begin = layout.prompt + (at - 1) * BLOCK
            positions = begin + jnp.arange(BLOCK, dtype=jnp.int32)[None]
            new = taps.part(slice(begin, begin + BLOCK))
            state = ingest_group(method, layout, own, state, (new,), (None,), positions, jnp.array([BLOCK]), False)
        if at in refreshes:
            yield at, state.store


def _errors(method: Any, layout: Any, own: Any, store: Any, taps: Taps) -> dict[str, tuple[np.ndarray, ...] | None]:
    """By text, RER of keys and of values and the error of logits `[K]` of a layer's stored tokens."""
    spec, taps, count = layout.spec, half_split(layout.spec, taps), int(store.tokens.length[0])
    where = np.asarray(store.tokens.positions.at(jnp.arange(count)))[0]
    rebuilt = (x[0, :, :count].swapaxes(0, 1) for x in method.rebuilt(layout, own, store))
    true = [x[0][where] for x in method.sides(taps)]
    lost = [x - y for x, y in zip(true, rebuilt, strict=True)]
    out: dict[str, tuple[np.ndarray, ...] | None] = {}
    for of, mine in (("prompt", where < layout.prompt), ("later", where >= layout.prompt)):
        if not mine.any():
            out[of] = None
            continue
        first = where[mine][0]
        asked = slice(first, where[mine][-1] + 1)
        shares = (np.asarray(jnp.sum(x[mine] ** 2, (0, 2)) / jnp.sum(y[mine] ** 2, (0, 2)))
                  for x, y in zip(lost, true, strict=True))
        positions = np.arange(taps.q.shape[1])
        error = logit_error(spec, method.rope, taps.q[0, asked], lost[0][mine], positions[asked], where[mine])
        out[of] = (*shares, error)
    return out


def _row(method: Any, at: int, of: str, errors: list) -> dict[str, Any]:
    names, there = ("rer_k", "rer_v", "logit_error"), [entry for entry in errors if entry is not None]
    means = [None] * 3 if not there else [float(np.mean(column)) for column in zip(*there, strict=True)]
    return {"method": spell_method(method), "refreshes": at, "of": of, **dict(zip(names, means, strict=True))}
