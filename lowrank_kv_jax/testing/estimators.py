"""What every estimator promises, each as a function of one that keeps eight directions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.estimators.estimator import Estimator, make_estimator

WIDTH, RANK, SIZE = 12, 4, 8
LEAD = (2, 3)


def learns_the_principal_subspace(made: Estimator) -> None:
    """Of a stream of ten batches: shapes stay, bases are orthonormal, leading directions stand first."""
    x, learned = stream(count=400), made.init(LEAD, WIDTH)
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), learned)
    for begin in range(0, 400, 40):
        learned = _update(made)(learned, x[..., begin : begin + 40, :])
    assert jax.tree.map(lambda a: (a.shape, a.dtype), learned) == shapes
    assert all(a.dtype == jnp.float32 for a in jax.tree.leaves(learned))
    basis = made.basis(learned, RANK)
    assert basis.shape == (*LEAD, WIDTH, RANK) and basis.dtype == jnp.float32
    np.testing.assert_allclose(basis.mT @ basis, np.broadcast_to(np.eye(RANK), (*LEAD, RANK, RANK)), atol=1e-5)
    assert least_lost(x) - 1e-6 <= lost(basis, x) < least_lost(x) + 0.03
    assert lost(basis[..., : RANK // 2], x) < least_lost(x, RANK // 2) + 0.05


def leaves_out_what_weighs_nothing(made: Estimator) -> None:
    """Leading axes are as if `vmap` had added them, and a token of weight 0 is none."""
    x, update = stream(), _update(made)
    together = update(made.init(LEAD, WIDTH), x)
    alone = jax.jit(jax.vmap(jax.vmap(made.update)))(made.init(LEAD, WIDTH), x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), together, alone)
    weight = jnp.arange(40) < 25
    short = update(made.init(LEAD, WIDTH), x[..., :25, :])
    padded = update(made.init(LEAD, WIDTH), x.at[..., 25:, :].set(7.0), weight)
    one, other = (np.abs(made.basis(s, RANK).mT @ x[0, 0].T) for s in (short, padded))
    np.testing.assert_allclose(one, other, atol=5e-3)
    nothing = update(short, x, jnp.zeros(40))
    one, other = (np.asarray(made.basis(s, RANK) @ made.basis(s, RANK).mT) for s in (short, nothing))
    np.testing.assert_allclose(one, other, atol=1e-4)


def begins_with_what_it_is_given(made: Estimator) -> None:
    """A starting basis, which gives way to what tokens say."""
    start = np.linalg.qr(np.random.default_rng(3).normal(size=(*LEAD, WIDTH, RANK)))[0]
    learned = made.init(LEAD, WIDTH, jnp.asarray(start, jnp.float32))
    found = jnp.abs(made.basis(learned, RANK).mT @ jnp.asarray(start, jnp.float32))
    np.testing.assert_allclose(found, np.broadcast_to(np.eye(RANK), (*LEAD, RANK, RANK)), atol=1e-3)
    for _ in range(30):
        learned = _update(made)(learned, stream())
    assert lost(made.basis(learned, RANK), stream()) < least_lost(stream()) + 0.03


def refuses_ranks_that_it_does_not_keep(made: Estimator) -> None:
    """By ValueError."""
    learned = made.init((), WIDTH)
    for rank in (WIDTH + 1, *([SIZE + 1] if hasattr(made, "size") else [])):
        try:
            made.basis(learned, rank)
        except ValueError:
            continue
        raise AssertionError(f"{made!r}: gives a basis of rank {rank}")


ESTIMATOR_PROMISES = (
    learns_the_principal_subspace, leaves_out_what_weighs_nothing, begins_with_what_it_is_given,
    refuses_ranks_that_it_does_not_keep,
)


def check_estimator(name: str) -> None:
    """Ask every promise of a registered estimator.

    Raises:
        AssertionError: it breaks one; the message says what.
        ValueError: no estimator has the name.
    """
    for promise in ESTIMATOR_PROMISES:
        promise(estimator_of(name, promise))


def estimator_of(name: str, promise: object = None) -> Estimator:
    """An estimator of eight directions, iterating once where iterations would amplify what rounding differs by."""
    once = {"iterations": 1} if promise is leaves_out_what_weighs_nothing else {}
    return make_estimator(name, size=SIZE, **once)


@functools.cache
def _update(made: Estimator):
    return jax.jit(made.update)


def stream(seed: int = 0, count: int = 40, lead: tuple[int, ...] = LEAD) -> jax.Array:
    """Tokens `[*lead, count, WIDTH]` with a clear principal subspace of their own for each of `lead`."""
    rng = np.random.default_rng(seed)
    scale = np.linspace(3.0, 0.1, WIDTH)
    rotation = np.linalg.qr(rng.normal(size=(*lead, WIDTH, WIDTH)))[0]
    x = rng.normal(size=(*lead, count, WIDTH)) * scale @ np.swapaxes(rotation, -1, -2)
    return jnp.asarray(x, jnp.float32)


def lost(basis: jax.Array | np.ndarray, x: jax.Array) -> float:
    """Residual energy ratio of tokens in a basis, mean over the leading axes."""
    tokens, columns = np.asarray(x, np.float64), np.asarray(basis, np.float64)
    return float(1 - (((tokens @ columns) ** 2).sum((-2, -1)) / (tokens**2).sum((-2, -1))).mean())


def least_lost(x: jax.Array, rank: int = RANK) -> float:
    """The same of the best basis."""
    return lost(np.linalg.svd(np.asarray(x))[2][..., :rank, :].swapaxes(-1, -2), x)
