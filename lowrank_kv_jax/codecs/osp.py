"""Online Subspace Projection: coefficients in chunks with bases of their own (papers/online_subspace_projection)."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.codecs.component_bits import uniform_bits
from lowrank_kv_jax.codecs.frame import as_met, as_seen
from lowrank_kv_jax.codecs.osp_checks import check_osp_fields
from lowrank_kv_jax.codecs.osp_chunks import ChunkedStore, Chunks, slots_of
from lowrank_kv_jax.codecs.osp_coding import Rules, take_page
from lowrank_kv_jax.codecs.osp_sides import Side, column_heads, prior_tokens, quarter_turn, side_by_side
from lowrank_kv_jax.codecs.principal import side_moments
from lowrank_kv_jax.codecs.subspace import Subspace, SubspaceBases, fit_subspaces, subspace_key
from lowrank_kv_jax.estimators import Estimator, make_estimator
from lowrank_kv_jax.method import Layout, register
from lowrank_kv_jax.method.codec import Ends, Tokens
from lowrank_kv_jax.pallas_kernels.chunked_attention import chunked_attention
from lowrank_kv_jax.segments import coded as coded_tokens
from lowrank_kv_jax.storage.chunk_bases import store_bases
from lowrank_kv_jax.storage.quantised import COEFFICIENTS, read_tokens

STREAMING: Mapping[str, Any] = {"rope": "post", "lookahead": 0, "prior": 0.0, "unseen": 0.0, "window": 256}
"""Section 7: a basis is taken from a trailing window alone."""


@register("osp")
@dataclasses.dataclass(frozen=True)
class OnlineSubspaceProjection(Subspace):
    """Adaptive subspaces (section 5): tokens are coded in the basis of their chunk, and a new chunk takes a new basis.

    An estimator learns keys and values as they are coded. Where a chunk begins, its basis is taken from what was
    learned of the tokens before it (weighted as a trailing window) and of those after it that are there already, and
    stays. A chunk ends when it is `chunk_length` tokens long, or when the mean relative residual of its last page
    exceeds a threshold; the residual costs nothing, ||x||^2 - ||c||^2. Pages of `min_chunk` tokens are the smallest
    chunks: a basis costs as much as head_dim tokens, which a trigger for each token would spend every few tokens.

    By default keys are coded before RoPE: the phases of a chunk's own tokens are not those of the next ones, and decoded
    text has shown few of its tokens when its basis is taken. The preset `osp:follow` codes them after RoPE in bases of
    what was seen; `osp:joint` has one basis over all heads of the layer, for contexts of some thousand tokens.

    All bases are one array of `chunks` slots. When they are used up, two adjacent chunks are merged into one.

    Attributes:
        chunk_length: L, the most tokens of a chunk.
        min_chunk: tokens of a page; None is half of `chunk_length`, at most 128. `chunk_length` must be a multiple of it.
        chunks: bases that there is room for, C; None is what the capacity needs at `chunk_length` tokens each. With
            thresholds it is at least 2, and a slot for each page where bases are kept when they run out.
        when_full: where a chunk begins and no slot is left: "merge", the two adjacent chunks that lose least by it share
            one basis from then on, and their coefficients are carried over; "keep", the last basis stays for all that
            follows. With chunks=1 it always stays.
        tau_k, tau_v: thresholds in [0, 1] on the mean relative residual of a page; None never triggers. See
            `lowrank-kv falsify --thresholds` for those of a residual percentile under the look-ahead that is set.
        reuse: a chunk keeps the basis before it if that overlaps with the new one by this much in every head
            (Tr(U1^T U2 U2^T U1) / r, in [0, 1]); None always takes the new one.
        window: W, the time constant in tokens of the weight of past tokens; None weighs all alike.
        prior: tokens that calibration counts for when a basis is taken. 0 is the paper's. Post-RoPE keys of the last few
            hundred tokens say little of the next: a trailing window alone loses more than the static basis.
        unseen: tokens that calibration counts for beside `prior`, for each token of the chunk that is not there yet when
            its basis is taken: all but `recent` of them while decoding, none of a chunk that lies in the prompt. A basis
            that stays for `chunk_length` tokens and has seen few of them loses more of the rest than a calibrated one.
        lookahead: tokens after the start of a chunk that its basis may be learned from, as far as they have been seen:
            all of them in a prompt, `recent` while decoding. 0 is the paper's streaming mode.
        estimator: a name of `estimators.ESTIMATORS`.
        sketch: what it keeps: a multiple of the rank (float), or rows (int), at least the rank; at most the width.
        subsample: learn from every so-many-th token of a page only, and of those ahead (section 9).
        rotary: the paper's rotation-aware basis: complex directions of the frequency pairs, which the rotation carries
            along from the chunk's anchor to each token. That is a basis of the keys before RoPE, held to contain i
            times each of its directions. Needs rope="pre" and even ranks.
        basis_dtype: of stored bases, "bfloat16", "float16", "float32", "float8_e4m3fn" or "int8"; None is the cache's.
    """

    rope: str = "pre"
    chunk_length: int = 512
    min_chunk: int | None = None
    chunks: int | None = None
    when_full: str = "merge"
    tau_k: float | None = None
    tau_v: float | None = None
    reuse: float | None = None
    window: int | None = 64
    prior: float = 64.0
    unseen: float = 0.5
    lookahead: int = 512
    estimator: str = "covariance"
    sketch: int | float = 2.0
    subsample: int = 1
    rotary: bool = False
    basis_dtype: str | None = None

    exact_at: ClassVar[Mapping[str, Any] | None] = {"rank": 1.0, "sinks": 4, "recent": 8, "chunk_length": 32}
    small: ClassVar[Mapping[str, Any]] = {"sinks": 4, "recent": 8, "chunk_length": 32}
    per_token: ClassVar[bool] = False
    counted: ClassVar[Mapping[str, Any]] = {"chunks": lambda store: store.chunks.used, "slots": slots_of}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "follow": {"rope": "post", "unseen": 0.0},
        "joint": {"heads": "joint", "rank": 0.4, "chunk_length": 2048, "lookahead": 1024},
        "streaming": STREAMING,
        "paper": STREAMING | {
            "estimator": "frequent_directions", "gamma": "sqrt_rank", "bits": 8, "basis_dtype": "float16", "tau_k": 0.2,
            "tau_v": 0.2, "sinks": 0, "recent": 0,
        },
    }

    def __post_init__(self):
        super().__post_init__()
        check_osp_fields(self)

    def fit(self, spec, moments):
        k, v = side_moments(self, spec, moments)
        if self.rotary:
            turn = quarter_turn(k.shape[-1], spec.head_dim)
            k = k + turn.T @ k @ turn
        return fit_subspaces(self, spec, moments, k, v)

    def fit_key(self, spec):
        return subspace_key(self, spec) | ({"rotary": True} if self.rotary else {})

    # ---- shapes -------------------------------------------------------------------------------------------------

    @property
    def page(self) -> int:
        return max(1, min(self.chunk_length // 2, 128)) if self.min_chunk is None else self.min_chunk

    def validate(self, spec):
        self.check_model(spec)
        if self.rotary and any(rope is None or rope.rotary_dim != spec.head_dim for rope in spec.each_rope):
            raise ValueError("rotary=True: this model does not rotate all channels of a head; use rotary=False")
        if self.energy is None:
            for rank in self.ranks(spec):
                self.learner(rank, self.width(spec)).check_rank(rank, self.width(spec))
                if self.rotary and rank % 2:
                    raise ValueError(f"rank={rank}: rotary=True needs even ranks, a complex direction has two columns")

    def learner(self, rank: int, width: int) -> Estimator:
        """The estimator of bases of this rank."""
        size = math.ceil(self.sketch * rank) if isinstance(self.sketch, float) else self.sketch
        if size < rank:
            raise ValueError(f"sketch={self.sketch!r}: keeps {size} directions, fewer than the rank {rank}")
        return make_estimator(self.estimator, size=min(size, width))

    def learners(self, spec: AttentionSpec, bases: SubspaceBases) -> tuple[Estimator, Estimator]:
        """Of keys and values; of whole heads where every head has a rank of its own."""
        if self.head_ranks == "own":
            whole = make_estimator(self.estimator, size=spec.head_dim)
            return whole, whole
        k, v = (self.learner(u.shape[-1], u.shape[-2]) for u in (bases.k, bases.v))
        return k, v

    def rules(self, layout: Layout, bases: SubspaceBases) -> Rules:
        """What decides how tokens are taken into chunks."""
        return Rules(self.page, self.chunk_length, self.tau_k, self.tau_v, self.reuse, self.window, self.prior,
                     self.unseen, self.lookahead, self.subsample, self.learners(layout.spec, bases), self.merges(layout))

    def slots(self, layout: Layout) -> int:
        """Slots of coded tokens: whole pages, and whole tiles of quantised ones."""
        unit = self.page if self.bits is None else math.lcm(self.page, COEFFICIENTS.tokens)
        size = max(layout.capacity - self.sinks - self.recent, layout.block, 1)
        return -(-size // unit) * unit

    def most_begun(self, layout: Layout) -> int:
        """How many chunks a full cache may have begun."""
        triggers = self.tau_k is not None or self.tau_v is not None
        return -(-self.slots(layout) // (self.page if triggers else self.chunk_length))

    def most_chunks(self, layout: Layout) -> int:
        """C. Raises ValueError for more chunks than there are pages."""
        pages, most = self.slots(layout) // self.page, self.most_begun(layout)
        if self.chunks is None:
            wanted = -(-self.slots(layout) // self.chunk_length)
            return min(most, max(2, wanted) if self.when_full == "merge" else most)
        if self.chunks > pages:
            raise ValueError(f"chunks={self.chunks}: a capacity of {layout.capacity} tokens has at most {pages} chunks "
                             f"of min_chunk={self.page}")
        return self.chunks

    def merges(self, layout: Layout) -> bool:
        """Whether bases may run out, and chunks are merged then."""
        return self.when_full == "merge" and 1 < self.most_chunks(layout) < self.most_begun(layout)

    # ---- the contract -------------------------------------------------------------------------------------------

    def ends(self, layout, bases):
        return Ends(self.sinks, self.recent, ahead=self.recent)

    def empty(self, layout, bases, size, positions=None):
        dtype, size = jnp.dtype(layout.dtype), layout.whole_slots(self.slots(layout), self.page)
        tokens = coded_tokens.empty_coded(
            layout.batch, (bases.k.shape[0], bases.k.shape[-1]), (bases.v.shape[0], bases.v.shape[-1]), size, dtype,
            uniform_bits(self.bits),
        )
        room, learned, kv_heads = [], [], layout.spec.kv_heads
        for u, by_rows, learner in zip((bases.k, bases.v), (False, True), self.learners(layout.spec, bases), strict=True):
            start, heads = u.astype(jnp.float32), None
            none = jnp.zeros((layout.batch, self.most_chunks(layout), *u.shape), jnp.float32).at[:, 0].set(start)
            if self.head_ranks == "own":
                heads = jnp.broadcast_to(column_heads(u, kv_heads).astype(jnp.uint8), (layout.batch, u.shape[-1]))
                start = start.reshape(kv_heads, -1, u.shape[-1])
            room.append(store_bases(none, self.basis_dtype or layout.dtype, by_rows, heads, kv_heads))
            start = jnp.broadcast_to(start, (layout.batch, *start.shape))
            learned.append(learner.init(start.shape[:2], start.shape[2], start))
        none, units = jnp.zeros((layout.batch,), jnp.int32), start.shape[1]
        return ChunkedStore(tokens, Chunks(
            *room, *learned, jnp.zeros((layout.batch, size // self.page), jnp.int32), none, none,
            jnp.zeros((layout.batch, 2, units), jnp.float32),
        ))

    def attend(self, layout, bases, store, q, positions, place, beside=None):
        spec = layout.spec
        return chunked_attention(
            as_met(q, self.gammas(spec, bases)), coded_tokens.cached_tokens(store.tokens), store.chunks.owner,
            store.chunks.k_bases, store.chunks.v_bases, page=self.page, rope=spec.rope if self.rope == "pre" else None,
            kv_heads=spec.kv_heads, **spec.logits, q_positions=positions, window=place.window,
            beside=beside,
        )

    def rebuilt(self, layout: Layout, bases: SubspaceBases, store: ChunkedStore) -> tuple[jax.Array, jax.Array]:
        """As `LowRank.rebuilt`."""
        heads, dim = layout.spec.kv_heads, layout.spec.head_dim
        sides = ((store.tokens.k, store.chunks.k_bases), (store.tokens.v, store.chunks.v_bases))
        out = []
        for stored, room in sides:
            c = read_tokens(stored)
            c = c.reshape(*c.shape[:2], -1, self.page, c.shape[-1])
            x = jnp.einsum("bjpsr,bpjwr->bjpsw", c, room.take(store.chunks.owner))
            x = x.reshape(*x.shape[:2], -1, heads // x.shape[1], dim).swapaxes(2, 3)
            out.append(x.reshape(len(x), heads, -1, dim))
        return as_seen(out[0], self.gammas(layout.spec, bases)), out[1]

    # ---- coding -------------------------------------------------------------------------------------------------

    def take_in(self, layout, bases, store, tokens, counts, seen, positions=None, of_prompt=False):
        """Page by page, with a new basis wherever a chunk begins, which may look at the tokens behind `counts`."""
        (one,) = tokens
        most = one.k.shape[1] - self.recent
        if positions is not None:
            most = one.k.shape[1]
            store = dataclasses.replace(store, tokens=dataclasses.replace(store.tokens, positions=positions))
            if most <= self.recent:
                return store
        sides, rules = self.coding_sides(layout, bases, one), self.rules(layout, bases)

        def step(_, carry):
            return take_page(rules, carry[0], sides, carry[1], counts, seen)

        # a row may begin in the middle of a page: one step more than there are pages
        steps = -(-(most + self.page - 1) // self.page)
        return jax.lax.fori_loop(0, steps, step, (store, jnp.zeros_like(counts)))[0]

    def coding_sides(self, layout: Layout, bases: SubspaceBases, tokens: Tokens) -> tuple[Side, Side]:
        """Keys and values of tokens as they are coded and learned."""
        spec, out = layout.spec, []
        given = zip(self.sides(tokens), (bases.k, bases.v), (bases.k_energy, bases.v_energy), strict=True)
        for index, (x, u, energy) in enumerate(given):
            own = self.head_ranks == "own"
            heads = column_heads(u, spec.kv_heads) if own else None
            turn = quarter_turn(u.shape[-2], spec.head_dim) if self.rotary and index == 0 else None
            out.append(Side(side_by_side(x.swapaxes(1, 2), self.basis_heads(spec)),
                            prior_tokens(u, energy, heads, spec.kv_heads), spec.head_dim if own else u.shape[-1], turn,
                            heads, spec.kv_heads))
        return out[0], out[1]
