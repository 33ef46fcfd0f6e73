"""The interface of everything a basis can be learned from, token by token."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32

from lowrank_kv_jax.checks.bounds import check_int
from lowrank_kv_jax.method.registry import check_free
from lowrank_kv_jax.storage import precise

PRIOR = 1e-3  # energy of a starting basis in estimators that keep energies: it decides only where no token does


@dataclasses.dataclass(frozen=True)
class Estimator(abc.ABC):
    """Learns the principal subspace of a stream of tokens. Subclasses are frozen dataclasses, abstract or final.

    The configuration is static; what was learned is a pytree of float32 arrays with any leading axes (rows, heads,
    layers), which every function works on at once. All functions are pure and traceable, shapes never change, and
    `vmap` adds axes as usual.
    """

    name: ClassVar[str]
    """The registered name, set by `register_estimator`."""

    keeps_energies: ClassVar[bool] = False
    """Whether it knows how much of the tokens' energy lies along a direction, so that those of several heads compare."""

    @abc.abstractmethod
    def init(self, lead: tuple[int, ...], width: int, start: Float[jax.Array, "... W R"] | None = None) -> Any:
        """What is known before any token.

        Args:
            lead: leading axes.
            width: W, channels of a token.
            start: orthonormal `[..., W, R]`, broadcast to `lead`, to begin with; it gives way to what the tokens say.
        """

    @abc.abstractmethod
    def update(
        self, learned: Any, x: Float[jax.Array, "*lead T W"], weight: Float[jax.Array, "..."] | None = None
    ) -> Any:
        """Learn from a batch of T >= 1 tokens.

        Args:
            learned: as `init` or `update` returned it.
            x: `[*lead, T, W]`.
            weight: of each token, at least 0, broadcasts to `[*lead, T]`; 0 leaves it out. None means 1.
        """

    @abc.abstractmethod
    def basis(self, learned: Any, rank: int) -> Float32[jax.Array, "*lead W R"]:
        """Orthonormal float32 `[*lead, W, rank]`, leading directions first.

        Raises:
            ValueError: `rank` exceeds what the estimator keeps.
        """

    def forget(self, learned: Any, factor: Float[jax.Array, "..."] | float) -> Any:
        """Scale the weight of all tokens seen so far by `factor` in [0, 1], broadcast to `lead`.

        Default: nothing; rules that hold only a basis forget by their step size.
        """
        del factor
        return learned

    def check_rank(self, rank: int, width: int) -> None:
        """Raise ValueError unless `basis` can give `rank` columns of `width` channels."""
        if not 1 <= rank <= width:
            raise ValueError(f"rank={rank}: must lie in 1..{width}, the width of the tokens")


@dataclasses.dataclass(frozen=True)
class SizedEstimator(Estimator):
    """Abstract. Keeps a fixed number of directions.

    Attributes:
        size: directions kept, at least the rank of any basis asked for.
    """

    size: int = 64

    def __post_init__(self):
        check_int("size", self.size, 1)

    def check_rank(self, rank: int, width: int) -> None:
        super().check_rank(rank, width)
        if rank > self.size:
            raise ValueError(f"size={self.size}: {self.name} keeps fewer directions than the rank {rank} asked for")


ESTIMATORS: dict[str, type[Estimator]] = {}

_Estimator = TypeVar("_Estimator", bound=Estimator)


def register_estimator(name: str) -> Callable[[type[_Estimator]], type[_Estimator]]:
    """Class decorator: make an estimator known to `make_estimator`, the comparison and the tests; see `register`."""

    def add(cls: type[_Estimator]) -> type[_Estimator]:
        check_free(ESTIMATORS, name, cls, "estimator")
        cls.name = name
        ESTIMATORS[name] = cls
        return cls

    return add


def make_estimator(name: str, **fields: Any) -> Estimator:
    """The estimator of that name; fields that it does not have are left out.

    Raises:
        ValueError: an unknown name, or a field out of range.
    """
    if name not in ESTIMATORS:
        raise ValueError(f"estimator={name!r}: allowed are {', '.join(sorted(ESTIMATORS))}")
    cls = ESTIMATORS[name]
    known = {field.name for field in dataclasses.fields(cls)}
    return cls(**{key: value for key, value in fields.items() if key in known})


def check_batch(
    x: Float[jax.Array, "*lead T W"], weight: Float[jax.Array, "..."] | None
) -> tuple[Float32[jax.Array, "*lead T W"], Float32[jax.Array, "*lead T"]]:
    """Tokens `[..., T, W]` and their weights `[..., T]`, float32."""
    x = x.astype(jnp.float32)
    if weight is None:
        return x, jnp.ones(x.shape[:-1], jnp.float32)
    return x, jnp.broadcast_to(weight.astype(jnp.float32), x.shape[:-1])


def batch_moment(
    x: Float32[jax.Array, "*lead T W"], weight: Float32[jax.Array, "*lead T"]
) -> Float32[jax.Array, "*lead W W"]:
    """Sum of w_t x_t x_t^T, float32 `[..., W, W]`, of tokens `[..., T, W]`."""
    left = x * weight[..., None]
    return precise.matmul(left.mT, x)


def start_moment(start: Float[jax.Array, "*lead W R"]) -> Float32[jax.Array, "*lead W W"]:
    """A second moment `[..., W, W]` of little energy whose leading directions are the columns of `start` in order."""
    rank = start.shape[-1]
    energy = PRIOR * (2 - jnp.arange(rank, dtype=jnp.float32) / rank)
    return precise.matmul(start * energy, start.mT).astype(jnp.float32)
