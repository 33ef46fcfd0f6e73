"""xKV: one SVD for a group of layers (Chang et al., 2025, "Cross-Layer SVD for KV-Cache Compression")."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.rope import rope_angles, rotate
from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.codecs import xkv_latents
from lowrank_kv_jax.codecs.component_bits import check_bits, mean_bits, stored_ranks, typical_profile, uniform_bits
from lowrank_kv_jax.codecs.frame import Frame
from lowrank_kv_jax.codecs.frame_attention import attend
from lowrank_kv_jax.codecs.layer_groups import (
    SPLIT_MULTIPLE,
    Ranks,
    read_table,
    resolve_pair,
    split_rank,
    stride_groups,
)
from lowrank_kv_jax.codecs.lowrank import tile_for
from lowrank_kv_jax.codecs.prompt_means import of_heads
from lowrank_kv_jax.codecs.refit import refit
from lowrank_kv_jax.codecs.xkv_store import SIDES, XKVStore, key_mean_of, side_by_side
from lowrank_kv_jax.estimators.rank import check_rank, rank_multiple, resolve_rank
from lowrank_kv_jax.estimators.rank_for_bytes import largest_rank
from lowrank_kv_jax.estimators.row_steps import fitted_steps
from lowrank_kv_jax.estimators.subspace_iteration import leading_subspace, wide_gram
from lowrank_kv_jax.method import Layout, register
from lowrank_kv_jax.method.codec import Ends, Logits, TokenCodec, Tokens, codes_of, take_tokens_in, with_others
from lowrank_kv_jax.method.group import LayerGroup
from lowrank_kv_jax.segments import coded as coded_tokens
from lowrank_kv_jax.selections.landmarks import Landmarks
from lowrank_kv_jax.storage.basis import project
from lowrank_kv_jax.storage.positions import Runs
from lowrank_kv_jax.storage.quantised import (
    BASIS_STORAGE,
    ScaledBasis,
    read_basis,
    rows_of_basis,
    store_basis,
)
from lowrank_kv_jax.storage.steps import plain_steps
from lowrank_kv_jax.storage.water_filled import empty_water_filled

FEW_COLUMNS = 64  # mean rank below which `smaller` takes any number: a multiple of 8 would leave much of the bytes unused


@register("xkv")
@dataclasses.dataclass(frozen=True)
class XKV(TokenCodec):
    """Cross-layer SVD of each prompt: keys before RoPE, and values; all heads of `group` layers side by side.

    [X_1, .., X_G] ~ A [B_1, .., B_G] (section 4): the token coefficients A are shared, every layer has its
    B. The paper keeps no exact tokens of the prompt (`sinks=0,recent=0`). Of latent attention (MLA) the latents before
    their norm are compressed and the rotary keys are not; `rank` and `smaller` then set the one rank there is.

    Attributes:
        group: G, adjacent layers that share coefficients; by default 4, or all layers of a shallower model.
            The last group of a model may be smaller. G = 1 is the Single SVD of the paper.
        rank: mean rank of keys and values, columns (int) or a fraction of the width G * K * D. A fraction, and what
            `smaller` finds from 64 columns on, is split into multiples of 8 (from a width of 64 on). The default gives
            way to what stands for it.
        ratio: rank of the values to that of the keys.
        rank_k, rank_v: instead of `rank`, both.
        table: instead of `rank`: ranks of every group, "k:v/k:v/..", e.g. those that keep 95% of the energy
            as `lowrank-kv cross-layer` prints them.
        smaller: instead of `rank`: the largest rank at which the cache of the prompt and one block of new
            tokens, bases and exact tokens included, is so many times smaller than a 16-bit full one. Further
            room for new tokens, exact in either, is left out; with `recompress` the whole capacity counts.
        sinks, recent: exact tokens at both ends of the prompt.
        bits: 8, 4 or 2 quantises the coefficients, a scale for each component of every 128 tokens; any other number up to
            8, say 2.5, is the mean of bits that components get by their variances, 8, 4, 2, 1 or none, in steps that are
            fitted to the prompt; None keeps them in the cache's dtype.
        basis_dtype: "bfloat16", "float16", "float32", "int8" or "float8_e4m3fn" (the last two with a scale
            for each column); None is the cache's dtype.
        rebuild: of the coded tokens, those that each step rebuilds and attends to: a number, or a fraction (1.0
            is exact). They are chosen in blocks, by the queries and the blocks' mean keys, which are kept; None
            rebuilds all.
        rebuild_block: tokens of such a block.
        recompress: appended tokens stay exact until so many have come, and are then coded; None, as in the
            paper's experiments: they stay exact for good.
        refit: whether the basis is fitted anew to all tokens when that happens (stored coefficients are
            carried over), or the new ones are projected on the prompt's.
        centred: code keys around the mean of those of the prompt that are coded, which is stored beside the bases. A bias
            (Qwen2) then costs no direction. Values keep their mean: around it they were coded worse (docs/xkv.md).
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
    bits: int | float | None = None
    basis_dtype: str | None = None
    rebuild: int | float | None = None
    rebuild_block: int = 32
    recompress: int | None = None
    refit: bool = True
    centred: bool = False

    exact_at: ClassVar[Mapping[str, Any] | None] = {"rank": 1.0, "sinks": 4, "recent": 8}
    small: ClassVar[Mapping[str, Any]] = {"sinks": 4, "recent": 8}
    latents: ClassVar[bool] = True
    layers_alike: ClassVar[bool] = True
    one_of: ClassVar[tuple[tuple[str, ...], ...]] = (("rank",), ("rank_k", "rank_v"), ("table",), ("smaller",))
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {  # 512 and 768 of the 4,096 columns of four Llama layers
        "paper": {"group": 4, "rank_k": 0.125, "rank_v": 0.1875, "sinks": 0, "recent": 0},
    }

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
                check_rank(field, getattr(self, field))
        if all(x is None for x in (self.rank, self.rank_k, self.table, self.smaller)):
            raise ValueError("rank=None: give rank, or rank_k and rank_v, or table, or smaller")
        if self.smaller is not None and not self.smaller > 0:
            raise ValueError(f"smaller={self.smaller!r}: must be a positive number")
        if not self.ratio > 0:
            raise ValueError(f"ratio={self.ratio!r}: must be a positive number")
        if self.rebuild is not None and self.recompress is not None:
            raise ValueError(f"rebuild={self.rebuild!r}, recompress={self.recompress!r}: blocks are laid out once, "
                             "at the prompt; give one of the two")
        check_bits(self.bits, by_component=True)
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

    # ---- the contract --------------------------------------------------------------------------------------

    def ends(self, layout, bases):
        return Ends(self.sinks, self.recent, flushes=self.recompress is not None, wait=self.recompress or 0,
                    asked=(self.sinks, self.recent))

    @property
    def lays_out(self):
        return self.recompress is not None

    @property
    def reading(self):
        return None if self.rebuild is None else Landmarks(self.rebuild, self.rebuild_block)

    def units(self, spec, bases):
        return 1

    def settled(self, layout, bases, weigh):
        """The ranks of `smaller`.

        Raises:
            ValueError: no rank makes the cache as small.
        """
        if bases.ranks is not None:
            return bases
        width, latent = _width(layout.spec, bases.layers), layout.spec.latent is not None
        if self.recompress is None:
            layout = dataclasses.replace(layout, capacity=layout.prompt + layout.block)

        def with_rank(mean: int) -> LayerGroup:
            multiple = _split_multiple(width) if mean >= FEW_COLUMNS else 1
            if latent:
                return LayerGroup(bases.layers, Ranks(mean - mean % multiple, 0))
            return LayerGroup(bases.layers, split_rank(mean, width, self.ratio, multiple))

        found = largest_rank(lambda mean: weigh(layout, with_rank(mean)), width, layout, bases.layers, self.smaller)
        return with_rank(found)

    def empty(self, layout, bases, size, positions=None):
        ranks, layers, dtype = bases.ranks, bases.layers, jnp.dtype(layout.dtype)
        if layout.spec.latent is not None:
            return xkv_latents.empty(layout, layers, ranks.k, size, self.bits, self._basis_dtype(layout), self.centred)
        bits, steps = mean_bits(self.bits), (None, None)
        if bits is None:
            tile = tile_for(size, positions)
            tokens = coded_tokens.empty_coded(
                layout.batch, (1, ranks.k), (1, ranks.v), size, dtype, uniform_bits(self.bits), tile, tile, positions,
                whole_tiles=positions is not None or self.recompress is not None, gaps=1,
            )
        else:
            profile = typical_profile(*ranks, bits)
            ranks = stored_ranks(profile, ranks)
            buffers = (empty_water_filled(layout.batch, 1, size, runs) for runs in profile)
            tokens = coded_tokens.without_tokens(*buffers, positions, gaps=1)
            steps = tuple(plain_steps((layout.batch, 1, rank), dtype) for rank in ranks)
        width = _width(layout.spec, layers)
        bases = (self._store_basis(layout, jnp.zeros((layout.batch, 1, width, r))) for r in ranks)
        mean = jnp.zeros((layout.batch, 1, width), dtype)
        return XKVStore(tokens, *bases, *steps, mean if self.centred else None)

    def learn(self, layout, bases, store, taps, lengths, weight):
        if layout.spec.latent is not None:
            return xkv_latents.learn(layout, store, taps, weight, self._basis_dtype(layout))
        mean = key_mean_of(taps, weight, layout.dtype) if self.centred else None
        new: dict[str, Any] = {"k_mean": mean}
        for side, _ in SIDES:
            x = side_by_side(taps, side, weight, mean)
            found = self._store_basis(layout, leading_subspace(wide_gram(x), getattr(store, f"{side}_basis").shape[-1]))
            new[f"{side}_basis"] = found
            if store.k_steps is not None:
                runs = getattr(store.tokens, side).runs
                new[f"{side}_steps"] = fitted_steps(project(read_basis(found), x), weight, runs, layout.dtype)
        return dataclasses.replace(store, **new)

    def encode(self, layout, bases, store, tokens):
        out = []
        for side, _ in SIDES:
            steps = getattr(store, f"{side}_steps")
            x = side_by_side(tokens, side, k_mean=store.k_mean)
            x = project(read_basis(getattr(store, f"{side}_basis")), x)
            out.append(x if steps is None else steps.count(x))
        return out[0], out[1]

    def take_in(self, layout, bases, store, tokens, counts, seen, positions=None, of_prompt=False):
        if layout.spec.latent is not None:
            if positions is None:
                return xkv_latents.take_more(layout, store, tokens, counts, self._basis_dtype(layout), self.refit)
            return xkv_latents.fill(layout, store, tokens, counts, positions)
        if positions is not None:
            positions = Runs(positions.start[:, :1], positions.jump[:, :1])  # what is appended follows it
            return take_tokens_in(self, layout, bases, store, tokens, counts, positions, of_prompt)
        size = store.tokens.k.shape[2]
        store = dataclasses.replace(store, tokens=coded_tokens.in_whole_tiles(store.tokens))
        store = take_tokens_in(self, layout, bases, store, tokens, counts, positions, of_prompt)
        return dataclasses.replace(store, tokens=coded_tokens.cut_to(store.tokens, size))

    def adapt(self, layout, bases, store, tokens, weight):
        """A basis for the stored coefficients, which are carried over, and the new tokens."""
        if not self.refit or self.recompress is None:
            return store
        return self._refitted(layout, store, tokens, weight)

    def relearn(self, layout, bases, store, tokens, weight):
        return self._refitted(layout, store, tokens, weight) if self.refit else store

    def _refitted(self, layout: Layout, store: XKVStore, tokens: tuple[Tokens, ...], weight: jax.Array) -> XKVStore:
        new: dict[str, Any] = {}
        held = store.tokens
        for side, _ in SIDES:
            x = side_by_side(tokens, side, weight, store.k_mean)
            basis, steps = (getattr(store, f"{side}_{what}") for what in ("basis", "steps"))
            rank = basis.shape[-1]

            def fit(moment: jax.Array, rank: int = rank) -> jax.Array | ScaledBasis:
                return self._store_basis(layout, leading_subspace(moment, rank))

            codes, new[f"{side}_basis"], new[f"{side}_steps"] = refit(
                layout, held, side, basis, steps, x, weight, wide_gram(x), fit)
            held = dataclasses.replace(held, **{side: codes})
        return dataclasses.replace(store, tokens=held, **new)

    def decode(self, layout, bases, store, k, v, positions, index):
        spec, frame = layout.spec, self._of_layer(layout, store, index)
        k, v = (frame.rebuild(side, x.astype(jnp.float32), spec.kv_heads) for side, x in (("k", k), ("v", v)))
        if spec.rope is not None:
            k = rotate(k, *rope_angles(spec.rope, positions.position))
        return k, v

    def attend(self, layout, bases, store, q, positions, place, beside=None):
        """Keys are rebuilt and rotated by blocks."""
        if layout.spec.latent is not None:
            return with_others(layout.spec, xkv_latents.attend(layout, store, q, positions, place), beside)
        frame, tokens = self._of_layer(layout, store, place.index), coded_tokens.cached_tokens(store.tokens)
        return attend(layout.spec, frame, tokens, q, positions, place, folds=False, rotates=True, beside=beside)

    def logits(self, layout, bases, store, q, place):
        k, v = codes_of(store)
        return Logits(q, self.decode(layout, bases, store, k, v, store.tokens.positions, place.index)[0])

    def _of_layer(self, layout: Layout, store: XKVStore, index: int | jax.Array) -> Frame:
        """The frame in which one layer of the group reads what is stored; bases `[B, 1, K * D, R]`."""
        width = layout.spec.kv_heads * layout.spec.head_dim
        begin = index * width
        k, v = (rows_of_basis(u, begin, width) for u in (store.k_basis, store.v_basis))
        mean = of_heads(store.k_mean, layout.spec.kv_heads, begin, width)
        return Frame(k, v, mean).of_codes(store.k_steps, store.v_steps, layout.spec.kv_heads)

    def _basis_dtype(self, layout: Layout) -> str:
        return self.basis_dtype or layout.dtype

    def _store_basis(self, layout: Layout, basis: jax.Array) -> jax.Array | ScaledBasis:
        return store_basis(basis, self._basis_dtype(layout))


def _split_multiple(width: int) -> int:
    """Of the ranks of keys and values that are chosen, not given."""
    return min(rank_multiple(width), SPLIT_MULTIPLE)


def _width(spec: AttentionSpec, layers: int) -> int:
    """Channels of what a group of layers compresses together: all heads' keys (or values), or the latents."""
    return layers * (spec.kv_heads * spec.head_dim if spec.latent is None else spec.latent.rank)
