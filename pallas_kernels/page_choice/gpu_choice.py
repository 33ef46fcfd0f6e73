"""The choice of pages on a GPU: a Pallas kernel in its Triton dialect, a program for each row and unit.

A page's share is a number of 0 and above, whose bits are an integer in the same order: the least that is taken is found
bit by bit, and what lies above it is written where the running sum of such pages says. XLA sorts all pages, and the
chosen ones a second time.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.packing import LOG2_E, power_of_two
from lowrank_kv_jax.pallas_kernels.page_choice.chosen import Chosen

MOST_PAGES = 1 << 14  # more would spill registers; counts of them are told by 16 bits
OF_THREAD = 8  # pages, where there are warps enough
LEAST, MOST_WARPS = 4, 16
MOST = 2**31 - 1  # the last page's wish: above the bits of every number
HALF = 16  # bits of an integer that hold one count of two


def choose_pages(
    logits: jax.Array, lengths: jax.Array, apart: jax.Array | None, *, units: int, queries: int, count: int, page: int,
    together: str, scale: float, cap: float | None, interpret: bool,
) -> Chosen:
    """As `api.choose_pages`.

    Raises:
        Unsupported: more than a query, capped logits, and more pages than registers hold.
    """
    batch, kv_heads, rows, pages = logits.shape
    if queries > 1 or cap is not None:
        raise Unsupported("pages for more than a query, or for capped logits")
    if pages > MOST_PAGES:
        raise Unsupported(f"{pages} pages, at most {MOST_PAGES} fit into registers")
    shares = logits.reshape(batch, units, kv_heads // units * rows, pages)
    padded = power_of_two(pages, 128)

    def of_unit(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *shape), lambda u, b: (b, u, *(0,) * len(shape)))

    number = pl.BlockSpec((1,), lambda u, b: (b,))
    told = [] if apart is None else [(apart, of_unit(*apart.shape[2:]))]
    operands = [(lengths, number), *told, (shares, of_unit(*shares.shape[2:]))]
    arrays, specs = zip(*operands, strict=True)
    return Chosen(*pl.pallas_call(
        functools.partial(_kernel, padded=padded, page=page, together=together, scale=scale),
        grid=(units, batch),
        in_specs=specs,
        out_specs=[of_unit(count), number],
        out_shape=[jax.ShapeDtypeStruct((batch, units, count), jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.int32)],
        compiler_params=plgpu.CompilerParams(num_warps=min(max(padded // (32 * OF_THREAD), LEAST), MOST_WARPS)),
        interpret=interpret,
        name="page_choice",
    )(*arrays))


def _kernel(length_ref, *refs, padded: int, page: int, together: str, scale: float):
    *apart_refs, logits_ref, chosen_ref, tokens_ref = refs
    pages, length = jnp.arange(padded), length_ref[0]
    held = pl.cdiv(length, page)
    share = jnp.where(pages < held, 0.0, -1.0)  # of none below 0: a mask beside it would take as many registers
    for ref in apart_refs:
        share = jax.lax.fori_loop(
            0, ref.shape[0], lambda i, share, ref=ref: jnp.where(pages == ref[i], -1.0, share), share)
    share = _add_shares(share, logits_ref, pages, together, scale)
    wish = jax.lax.bitcast_convert_type(share, jnp.int32)
    found = _write(chosen_ref, pages, jnp.where((pages == held - 1) & (wish >= 0), MOST, wish), logits_ref.shape[1])
    # only the last page may hold fewer, which is chosen of every unit: all have as many tokens, and write the same
    tokens_ref[0] = found * page - (held * page - length)


def _add_shares(share, logits_ref, pages, together: str, scale: float):
    """What a unit's query heads give each page, float32 `[padded]`: their softmax over those that start with 0."""

    def add(head, share):
        there = share >= 0
        logits = plgpu.load(logits_ref.at[head, pages], mask=there, other=-jnp.inf) * (scale * LOG2_E)
        weights = jnp.exp2(logits - jnp.max(logits))
        own = weights / jnp.sum(weights)
        return jnp.where(there, jnp.maximum(share, own) if together == "max" else share + own, share)

    return jax.lax.fori_loop(0, logits_ref.shape[0], add, share)


def _write(chosen_ref, pages, wish, size: int):
    """Write the pages with the largest of the wishes `[padded]`, of equal ones the first, ascending, and `size` behind
    them; how many there are. What has a wish below 0 is none."""
    count = chosen_ref.shape[0]
    least = _least(wish, count)
    above, equal = wish > least, (wish == least) & (wish >= 0)
    spare = count - _count(above)
    through = jnp.cumsum((above.astype(jnp.int32) << HALF) + equal.astype(jnp.int32))  # two sums at once
    above_through, equal_through = through >> HALF, through & ((1 << HALF) - 1)
    taken = above | (equal & (equal_through <= spare))
    place = jnp.where(taken, above_through + jnp.minimum(equal_through, spare) - 1, count + pages)  # no two at one place
    plgpu.store(chosen_ref.at[place], pages, mask=taken)
    found = _count(taken)
    missing = jnp.arange(power_of_two(count, 128))
    plgpu.store(chosen_ref.at[missing], jnp.zeros_like(missing) + size, mask=(missing >= found) & (missing < count))
    return found


def _least(wish, count: int):
    """The largest number that at least `count` of the wishes reach; 0 where there are fewer of 0 and above."""

    def with_bits(i, least):
        step = 1 << (28 - 2 * i)
        one, two, three = (_reach(wish, least + times * step) for times in (1, 2, 3))
        both = jnp.sum(one + (two << HALF))
        reached = (both & ((1 << HALF) - 1), both >> HALF, jnp.sum(three))
        return least + step * sum((x >= count).astype(jnp.int32) for x in reached)

    top = (jnp.sum(_reach(wish, 1 << 30)) >= count).astype(jnp.int32) << 30
    return jax.lax.fori_loop(0, 15, with_bits, top)


def _reach(wish, least):
    return (wish >= least).astype(jnp.int32)


def _count(flags):
    return jnp.sum(flags.astype(jnp.int32))
