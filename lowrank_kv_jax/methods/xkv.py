"""xKV: one SVD for a group of layers (Chang et al., 2025, "Cross-Layer SVD for KV-Cache Compression")."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from lowrank_kv_jax.codecs.basis import expand_values, project
from lowrank_kv_jax.codecs.quantised import (
    BASIS_STORAGE,
    ScaledBasis,
    read_basis,
    read_tokens,
    store_basis,
    store_tokens,
)
from lowrank_kv_jax.estimators.subspace_iteration import gram, leading_subspace
from lowrank_kv_jax.layer_groups import (
    SPLIT_MULTIPLE,
    LayerGroup,
    Ranks,
    read_table,
    resolve_pair,
    split_rank,
    stride_groups,
)
from lowrank_kv_jax.method import KVMethod, Layout, Place, register
from lowrank_kv_jax.methods import xkv_latents
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention import rotary_coefficient_attention
from lowrank_kv_jax.partial import AttnPartial, merge
from lowrank_kv_jax.positions import Runs
from lowrank_kv_jax.rank import rank_multiple, resolve_rank
from lowrank_kv_jax.rank_for_bytes import largest_rank
from lowrank_kv_jax.rope import rope_angles, rotate
from lowrank_kv_jax.segments import coded as coded_tokens
from lowrank_kv_jax.segments import exact as exact_tokens
from lowrank_kv_jax.selection import blocks
from lowrank_kv_jax.spec import AttentionSpec
from lowrank_kv_jax.state import leaf, state, write_tokens

FEW_COLUMNS = 64  # mean rank below which `smaller` takes any number: a multiple of 8 would leave much of the bytes unused


@state
class XKVState:
    """The cache of a group of G layers.

    Attributes:
        exact: of each layer, its sinks, the prompt's last tokens and those appended since.
        coded: the rest, as coefficients `[B, 1, S, R]` that all layers share.
        k_basis, v_basis: `[B, 1, G * K * D, R]`, layer by layer, the B_l of the paper one below the other.
        landmarks: of each layer, where only some blocks of tokens are rebuilt; else none.
    """

    exact: tuple[exact_tokens.Exact, ...]
    coded: coded_tokens.Coded
    k_basis: jax.Array | ScaledBasis = leaf("batch", "kv_heads", "width", "rank", kind="bases")
    v_basis: jax.Array | ScaledBasis = leaf("batch", "kv_heads", "width", "rank", kind="bases")
    landmarks: tuple[blocks.Landmarks, ...] = ()


@register("xkv")
@dataclasses.dataclass(frozen=True)
class XKV(KVMethod):
    """Cross-layer SVD of each prompt: keys before RoPE, and values; all heads of `group` layers side by side.

    [X_1, .., X_G] ~ A [B_1, .., B_G] (section 4): the token coefficients A are shared, every layer has its
    B. The paper keeps no exact tokens of the prompt (`sinks=0,recent=0`). Of latent attention (MLA) the latents before
    their norm are compressed and the rotary keys are not; `rank` and `smaller` then set the one rank there is.

    Attributes:
        group: G, adjacent layers that share coefficients; by default 4, or all layers of a shallower model.
            The last group of a model may be smaller. G = 1 is the Single SVD of the paper.
        rank: mean rank of keys and values, columns (int) or a fraction of the width G * K * D. A fraction, and what
            `smaller` finds from 64 columns on, is split into multiples of 8 (from a width of 64 on).
        ratio: rank of the values to that of the keys.
        rank_k, rank_v: instead of `rank`, both.
        table: instead of `rank`: ranks of every group, "k:v/k:v/..", e.g. those that keep 95% of the energy
            as `lowrank-kv cross-layer` prints them.
        smaller: instead of `rank`: the largest rank at which the cache of the prompt and one block of new
            tokens, bases and exact tokens included, is so many times smaller than a 16-bit full one. Further
            room for new tokens, exact in either, is left out; with `recompress` the whole capacity counts.
        sinks, recent: exact tokens at both ends of the prompt.
        bits: 8 keeps coefficients in int8, None in the cache's dtype.
        basis_dtype: "bfloat16", "float16", "float32", "int8" or "float8_e4m3fn" (the last two with a scale
            for each column); None is the cache's dtype.
        rebuild: of the coded tokens, those that each step rebuilds and attends to: a number, or a fraction (1.0
            is exact). They are chosen in blocks of `rebuild_block`, by the queries and the blocks' mean keys, which
            are kept; None rebuilds all.
        recompress: appended tokens stay exact until so many have come, and are then coded; None, as in the
            paper's experiments: they stay exact for good.
        refit: whether the basis is fitted anew to all tokens when that happens (stored coefficients are
            carried over), or the new ones are projected on the prompt's.
    """

    group: int | None = None
    rank: int | float | None = 0.25
    ratio: float = 1.5
    rank_k: int | float | None = None
    rank_v: int | float | None = None
    table: str | None = None
    smaller: float | None = None
    sinks: int = 32
    recent: int = 32
    bits: int | None = None
    basis_dtype: str | None = None
    rebuild: int | float | None = None
    rebuild_block: int = 32
    recompress: int | None = None
    refit: bool = True

    latents: ClassVar[bool] = True
    stage: ClassVar[str | None] = "codec"

    def __post_init__(self):
        for field, least in (("group", 1), ("sinks", 0), ("recent", 0), ("rebuild_block", 1), ("recompress", 1)):
            value = getattr(self, field)
            optional = field in ("group", "recompress")
            if not (value is None and optional) and (type(value) is not int or value < least):
                raise ValueError(f"{field}={value!r}: must be an int of at least {least}")
        if (self.rank_k is None) != (self.rank_v is None):
            raise ValueError(f"rank_k={self.rank_k!r}, rank_v={self.rank_v!r}: give both or none")
        for field in ("rank", "rank_k", "rank_v", "rebuild"):
            if getattr(self, field) is not None:
                resolve_rank(field, getattr(self, field), width=1 << 30)
        if all(x is None for x in (self.rank, self.rank_k, self.table, self.smaller)):
            raise ValueError("rank=None: give rank, or rank_k and rank_v, or table, or smaller")
        if self.smaller is not None and not self.smaller > 0:
            raise ValueError(f"smaller={self.smaller!r}: must be a positive number")
        if not self.ratio > 0:
            raise ValueError(f"ratio={self.ratio!r}: must be a positive number")
        if self.rebuild is not None and self.recompress is not None:
            raise ValueError(f"rebuild={self.rebuild!r}, recompress={self.recompress!r}: blocks are laid out once, "
                             "at the prompt; give one of the two")
        if self.bits not in (None, 8):
            raise ValueError(f"bits={self.bits!r}: allowed are None and 8")
        if self.basis_dtype not in (None, *BASIS_STORAGE):
            raise ValueError(
                f"basis_dtype={self.basis_dtype!r}: allowed are None, {', '.join(BASIS_STORAGE)}"
            )

    # ---- groups and ranks ----------------------------------------------------------------------------------

    def layer_groups(self, spec: AttentionSpec) -> tuple[tuple[int, ...], ...]:
        size = min(4, spec.num_layers) if self.group is None else self.group
        if size > spec.num_layers:
            raise ValueError(f"group={size}: the model has {spec.num_layers} layers")
        return stride_groups(spec.num_layers, size)

    def validate(self, spec: AttentionSpec) -> None:
        if spec.latent is not None:
            for field in ("rank_k", "table", "rebuild", "recompress"):
                if (value := getattr(self, field)) is not None:
                    raise ValueError(f"{field}={value!r}: this model caches one latent a token (MLA), which is coded "
                                     "once, at the prompt; give rank or smaller")
        self.default_bases(spec)

    def default_bases(self, spec: AttentionSpec) -> tuple[LayerGroup, ...]:
        """The size of each group and its ranks: bases come from the prompts themselves."""
        groups = self.layer_groups(spec)
        table = None if self.table is None else read_table(self.table, len(groups))
        return tuple(
            self._group(spec, len(g), None if table is None else table[i]) for i, g in enumerate(groups)
        )

    def _group(self, spec: AttentionSpec, layers: int, given: tuple[int, int] | None) -> LayerGroup:
        width = _width(spec, layers)
        if self.smaller is not None:
            return LayerGroup(layers)
        if spec.latent is not None:
            return LayerGroup(layers, Ranks(resolve_rank("rank", self.rank or 1, width), 0))
        if given is not None:
            return LayerGroup(layers, resolve_pair(width, ("table", given[0]), ("table", given[1])))
        if self.rank_k is not None and self.rank_v is not None:
            return LayerGroup(layers, resolve_pair(width, ("rank_k", self.rank_k), ("rank_v", self.rank_v)))
        assert self.rank is not None
        mean, chosen = resolve_rank("rank", self.rank, width), isinstance(self.rank, float)
        return LayerGroup(layers, split_rank(mean, width, self.ratio, _split_multiple(width) if chosen else 1))

    def ranks(self, layout: Layout, group: LayerGroup) -> Ranks:
        """Ranks of a group in a cache of this shape.

        Raises:
            ValueError: no rank makes the cache `smaller` than asked.
        """
        return group.ranks if group.ranks is not None else ranks_for_bytes(self, self, layout, group.layers)

    def compose_with(self, selection: KVMethod, summary: Any) -> KVMethod:
        """The composition that selects tokens for a whole group of layers, and fits to what was selected."""
        from lowrank_kv_jax.methods.xkv_selected import select_for_groups

        return select_for_groups(self, selection, summary)

    # ---- the contract --------------------------------------------------------------------------------------

    def init(self, layout: Layout, bases: LayerGroup) -> XKVState:
        return self.empty(layout, bases.layers, self.ranks(layout, bases))

    def empty(self, layout: Layout, layers: int, ranks: Ranks, tokens: int | None = None) -> Any:
        """An empty state of a group with the given ranks; `tokens`: coded ones, by default all that are not exact."""
        if layout.spec.latent is not None:
            return xkv_latents.empty(self, layout, layers, ranks.k)
        spec, dtype, held = layout.spec, jnp.dtype(layout.dtype), self.sinks + self.recent
        if self.recompress is None:
            exact_size = min(held, layout.prompt) + max(layout.capacity - layout.prompt, layout.block)
            coded_size = max(layout.prompt - held if tokens is None else tokens, 1)
        else:
            exact_size = held + self.recompress + layout.block
            coded_size = max(layout.capacity - held, self._flushed(layout))
        exact = exact_tokens.empty_exact(
            layout.batch, spec.kv_heads, exact_size, spec.head_dim, dtype, gaps=(self.sinks, self._pinned())
        )
        marks = ()
        if self.rebuild is not None:
            count = -(-coded_size // self.rebuild_block)
            coded_size = count * self.rebuild_block
            marks = (blocks.Landmarks(jnp.zeros((layout.batch, spec.kv_heads, count, spec.head_dim), dtype)),) * layers
        coded = coded_tokens.empty_coded(layout.batch, (1, 1), (1, 1), 1, dtype)
        k, v = (store_tokens(jnp.zeros((layout.batch, 1, coded_size, r)), self.bits, dtype) for r in ranks)
        width = _width(spec, layers)
        bases = (self._store_basis(layout, jnp.zeros((layout.batch, 1, width, r))) for r in ranks)
        positions = self._coded_positions(jnp.zeros((layout.batch,), jnp.int32))
        coded = dataclasses.replace(coded, k=k, v=v, positions=positions)
        return XKVState((exact,) * layers, coded, *bases, marks)

    def compress(self, layout, bases, state, taps, lengths):
        if layout.spec.latent is not None:
            return xkv_latents.compress(self, layout, state, taps, lengths)
        slots = jnp.arange(layout.prompt)[None]
        coded = (slots >= self.sinks) & (slots < lengths[:, None] - self.recent)
        weight = coded.astype(jnp.float32)
        keys, values = (side_by_side([getattr(tap, name) for tap in taps], weight) for name in ("k_pre", "v"))
        fitted = self.fit_group(layout, state, keys, values)
        counts = jnp.maximum(lengths - self.sinks - self.recent, 0)
        # all tokens are projected, and the exact ones dropped after: a part of the wide ones would be copied first
        part = slice(self.sinks, max(layout.prompt - self.recent, self.sinks))
        codes = (project(read_basis(u), x)[:, :, part] for u, x in zip(fitted, (keys, values), strict=True))
        coded = self.hold(layout, state.coded, *codes, counts, self._coded_positions(counts))
        exact = tuple(
            exact_tokens.hold_prompt(segment, tap.k, tap.v, lengths, self.sinks, self.recent)
            for segment, tap in zip(state.exact, taps, strict=True)
        )
        return XKVState(exact, coded, *fitted, self._landmarks(layout, state, taps, weight))

    def fit_group(self, layout: Layout, state: XKVState, keys: jax.Array, values: jax.Array) -> list:
        """Bases of tokens `[B, S, 1, W]`, zero where none is to be coded, as they are stored."""
        sides = ((keys, state.k_basis), (values, state.v_basis))
        return [self._store_basis(layout, leading_subspace(gram(x), stored.shape[-1])) for x, stored in sides]

    def append(self, layout, bases, state, taps, counts, positions, place):
        exact = list(state.exact)
        exact[place.index] = exact_tokens.append(exact[place.index], taps.k, taps.v, counts)
        return dataclasses.replace(state, exact=tuple(exact))

    def attend(self, layout, bases, state, q, positions, place):
        near = exact_tokens.attend(
            state.exact[place.index], q, positions, scale=layout.spec.scale, window=place.window
        )
        if layout.spec.latent is not None:
            return merge([near, xkv_latents.attend_coded(layout, state, q, positions, place)])
        return merge([near, self.attend_coded(layout, state, q, positions, place)])

    def attend_coded(
        self, layout: Layout, state: XKVState, q: jax.Array, positions: jax.Array, place: Place
    ) -> AttnPartial:
        """Attention of one layer over the shared coefficients: keys are rebuilt and rotated by blocks."""
        spec, tokens = layout.spec, coded_tokens.cached_tokens(state.coded)
        if state.landmarks:
            size, marks = self.rebuild_block, state.landmarks[place.index]
            count = self._rebuilt_blocks(marks.k.shape[2])
            if count < marks.k.shape[2]:
                tokens = blocks.take(tokens, blocks.choose(marks, tokens.lengths, q, spec.scale, size, count), size)
        width = spec.kv_heads * spec.head_dim
        begin = place.index * width
        k_basis, v_basis = (read_basis(u, begin, begin + width) for u in (state.k_basis, state.v_basis))
        out, lse = rotary_coefficient_attention(
            q,
            tokens,
            k_basis,
            rope=spec.rope,
            kv_heads=spec.kv_heads,
            scale=spec.scale,
            q_positions=positions,
            causal=False,
            window=place.window,
        )
        return AttnPartial(expand_values(v_basis, out, spec.kv_heads), lse)

    def refresh(self, layout, bases, state):
        if self.recompress is None:
            return state
        full = jnp.any(state.exact[0].length >= self.sinks + self.recent + self.recompress)
        return jax.lax.cond(full, functools.partial(self._recompress, layout), lambda state: state, state)

    # ---- blocks --------------------------------------------------------------------------------------------

    def _rebuilt_blocks(self, there: int) -> int:
        """How many of `there` blocks are rebuilt."""
        if isinstance(self.rebuild, float):
            return max(1, round(self.rebuild * there))
        return min(-(-(self.rebuild or 0) // self.rebuild_block), there)

    def _landmarks(self, layout: Layout, state: XKVState, taps, weight: jax.Array) -> tuple[blocks.Landmarks, ...]:
        if not state.landmarks:
            return ()
        part = slice(self.sinks, max(layout.prompt - self.recent, self.sinks))
        count, dtype = state.landmarks[0].k.shape[2], jnp.dtype(layout.dtype)
        return tuple(
            blocks.landmarks(tap.k[:, part], weight[:, part], self.rebuild_block, count, dtype) for tap in taps
        )

    # ---- storage -------------------------------------------------------------------------------------------

    def _store_basis(self, layout: Layout, basis: jax.Array) -> jax.Array | ScaledBasis:
        return store_basis(basis, self.basis_dtype or layout.dtype)

    def hold(self, layout, segment, k, v, counts, positions) -> coded_tokens.Coded:
        """A segment like `segment` that holds the coefficients `[B, 1, S, R]`."""

        def fill(stored, codes):
            size = min(stored.shape[2], codes.shape[2])
            room = ((0, 0), (0, 0), (0, stored.shape[2] - size), (0, 0))
            return store_tokens(jnp.pad(codes[:, :, :size], room), self.bits, jnp.dtype(layout.dtype))

        return coded_tokens.Coded(fill(segment.k, k), fill(segment.v, v), counts, positions)

    def _pinned(self) -> int:
        """Slots of the exact segments behind which tokens may be missing."""
        return self.sinks + (self.recent if self.recompress is None else 0)

    def _coded_positions(self, counts: jax.Array) -> Runs:
        """Of coded tokens: those of the prompt behind its sinks, and those that were flushed since, without a gap."""
        zero = jnp.zeros_like(counts)[:, None]
        return Runs(zero, zero + self.sinks)

    # ---- long generations ----------------------------------------------------------------------------------

    def _flushed(self, layout: Layout) -> int:
        """Most tokens that are coded at once."""
        return (self.recompress or 0) + layout.block

    def _recompress(self, layout: Layout, state: XKVState) -> XKVState:
        """Code the oldest exact tokens of the rows that have enough of them, all but the `recent` ones."""
        due = state.exact[0].length >= self.sinks + self.recent + (self.recompress or 0)
        stay = jnp.where(due, self.recent, state.exact[0].length)
        flushed = [
            exact_tokens.flush(segment, self.sinks, stay, self._flushed(layout)) for segment in state.exact
        ]
        exact = tuple(segment for segment, _ in flushed)
        _, _, positions, counts = flushed[0][1]
        weight = (jnp.arange(positions.shape[1])[None] < counts[:, None]).astype(jnp.float32)
        keys, values = ([getattr(out, side).swapaxes(1, 2) for _, out in flushed] for side in ("k", "v"))
        if layout.spec.rope is not None:
            cos, sin = rope_angles(layout.spec.rope, positions[:, :, None])
            keys = [rotate(k.astype(jnp.float32), cos, -sin) for k in keys]
        bases, codes = [], []
        for basis, stored, parts in (
            (state.k_basis, state.coded.k, keys),
            (state.v_basis, state.coded.v, values),
        ):
            wide, new = read_tokens(stored), side_by_side(parts, weight)
            basis, old, new = self._join(layout, basis, wide, state.coded.length, new, weight)
            bases.append(basis)
            codes.append(write_tokens(old, new, state.coded.length, counts))
        coded = self.hold(layout, state.coded, *codes, state.coded.length + counts, state.coded.positions)
        return XKVState(exact, coded, *bases)

    def _join(
        self, layout: Layout, stored, old: jax.Array, lengths: jax.Array, x: jax.Array, weight: jax.Array
    ):
        """A basis for old coefficients and new tokens, the old ones carried over and the new ones in it."""
        basis = read_basis(stored)
        if self.refit:
            inner = jnp.einsum("bjsr,bjsp->bjrp", old, old)  # free slots hold zeros
            moment = jnp.einsum("bjwr,bjrp,bjvp->bjwv", basis, inner, basis) + gram(x)
            fed = (jnp.sum(weight, axis=1) > 0)[:, None, None, None]
            moved = jnp.where(fed, leading_subspace(moment, basis.shape[-1]), basis)
            stored = self._store_basis(layout, moved)
            moved = read_basis(stored)
            old, basis = jnp.where(fed, coded_tokens.transport(old, lengths, basis, moved), old), moved
        return stored, old, project(basis, x)


def side_by_side(parts: list[jax.Array], weight: jax.Array) -> jax.Array:
    """Tokens float32 `[B, S, 1, G * K * D]` of tokens `[B, S, K, D]` of G layers, times `weight` `[B, S]`.

    Raises:
        ValueError: the layers differ in shape.
    """
    shapes = [x.shape for x in parts]
    if len(set(shapes)) > 1:
        raise ValueError(f"the layers of a group must have one shape, got {shapes}: use a smaller group")
    return jnp.concatenate([x.reshape(*x.shape[:2], 1, -1) for x in parts], axis=-1) * weight[:, :, None, None]


@functools.lru_cache(maxsize=256)
def ranks_for_bytes(method: XKV, holder: Any, layout: Layout, layers: int) -> Ranks:
    """The ranks of `method.smaller`; `holder.empty` makes the states that are weighed."""
    width = _width(layout.spec, layers)
    if method.recompress is None:
        layout = dataclasses.replace(layout, capacity=layout.prompt + layout.block)

    def ranks(mean: int) -> Ranks:
        multiple = _split_multiple(width) if mean >= FEW_COLUMNS else 1
        if layout.spec.latent is not None:
            return Ranks(mean - mean % multiple, 0)
        return split_rank(mean, width, method.ratio, multiple)

    def make(mean: int):
        return jax.eval_shape(lambda: holder.empty(layout, layers, ranks(mean)))

    return ranks(largest_rank(make, width, layout, layers, method.smaller))


def _split_multiple(width: int) -> int:
    """Of the ranks of keys and values that are chosen, not given."""
    return min(rank_multiple(width), SPLIT_MULTIPLE)


def _width(spec: AttentionSpec, layers: int) -> int:
    """Channels of what a group of layers compresses together: all heads' keys (or values), or the latents."""
    return layers * (spec.kv_heads * spec.head_dim if spec.latent is None else spec.latent.rank)
