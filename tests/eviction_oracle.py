"""Eviction step by step in float64 NumPy and plain Python lists, written from the papers; and a driver for a method.

The oracle knows nothing of buffers: a head is a list of tokens, eviction removes from the list.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.spec import AttentionSpec, Taps
from lowrank_kv_jax.generation.groups import step_group
from lowrank_kv_jax.method import Layout, Place
from lowrank_kv_jax.methods import machine_of

SPEC = AttentionSpec(1, 4, 2, 8, None, 4096, (None,))
CAPACITY = 96  # of every cache that is driven: streams of any length share their compiled functions


class Stream(NamedTuple):
    """q `[S, N, D]`, k and v `[S, K, D]`, float64; logits of sinks `[N]`, -inf where there are none."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    sinks: np.ndarray


def make_stream(kind: str, size: int, seed: int, spec: AttentionSpec = SPEC) -> Stream:
    """Random tokens; "ties": many are equal, "giant": one key is huge, "constant": all values are equal, "sinks": query
    heads have logits of their own."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(size, spec.q_heads, spec.head_dim))
    k = rng.normal(size=(size, spec.kv_heads, spec.head_dim))
    v = rng.normal(size=(size, spec.kv_heads, spec.head_dim))
    if kind == "ties":
        k, v = (x[np.arange(size) // 3 % 5] for x in (k, v))
    if kind == "giant":
        k[size // 3] *= 50
    if kind == "constant":
        v[:] = v[0]
    sinks = rng.normal(3.0, 2.0, spec.q_heads) if kind == "sinks" else np.full(spec.q_heads, -np.inf)
    return Stream(*(x.astype(np.float32).astype(np.float64) for x in (q, k, v, sinks)))


def softmax(x, sink=-np.inf):
    """Over the last axis; `sink` joins the denominator."""
    top = np.maximum(x.max(-1, keepdims=True), sink)
    weights = np.exp(x - top)
    return weights / (weights.sum(-1, keepdims=True) + np.exp(sink - top))


def taps_of(stream: Stream, begin: int, end: int) -> Taps:
    """A batch of one row of tokens `begin` to `end`."""
    q, k, v = (jnp.asarray(x[None, begin:end], jnp.float32) for x in stream[:3])
    sinks = jnp.asarray(stream.sinks, jnp.float32) if np.isfinite(stream.sinks).all() else None
    return Taps(q, k, k, v, k[:, :, 0], sink_logits=sinks)


@functools.cache
def compiled(method, layout):
    """compress, one step and refresh, compiled once for all streams of a shape."""
    (bases,) = method.default_bases(SPEC)

    def compress(taps, lengths):
        return machine_of(method).compress(layout, bases, machine_of(method).init(layout, bases), (taps,), lengths)

    def step(state, taps, positions):
        counts = jnp.asarray([taps.k.shape[1]], jnp.int32)
        state, partial = step_group(method, layout, Place(), bases, state, taps, positions, counts)
        return state, partial.out

    return jax.jit(compress), jax.jit(step), jax.jit(lambda state: machine_of(method).refresh(layout, bases, state))


def drive(method, stream, prompt, *, block=8, refresh_every=8):
    """Feed a stream to a method as a model would; the final state and outputs `[S - prompt, N, D]` of its decoding."""
    size = len(stream.q)
    layout = Layout(SPEC, 1, prompt, CAPACITY, block, "float32")
    compress, step, refresh = compiled(method, layout)
    if prompt:
        state = compress(taps_of(stream, 0, prompt), jnp.asarray([prompt], jnp.int32))
    else:
        state = machine_of(method).init(layout, *method.default_bases(SPEC))
    outs = []
    for at in range(prompt, size):
        if at > prompt and (at - prompt) % refresh_every == 0:
            state = refresh(state)
        state, out = step(state, taps_of(stream, at, at + 1), jnp.asarray([[at]], jnp.int32))
        outs.append(np.asarray(out[0]))
    return state, np.concatenate(outs) if outs else None


positions_at = jax.jit(lambda runs, slots: runs.at(slots))


def check_ends(state, stream, sinks, recent):
    """Sinks and recent tokens are held, selected ones lie between them and once a head, keys are those of the stream."""
    held, size = state.ends[0], len(stream.q)
    at = np.asarray(positions_at(held.positions, np.arange(held.k.shape[2])))[0, : int(held.length[0])].tolist()
    assert set(range(sinks)) <= set(at) and set(range(size - recent, size)) <= set(at)
    for found in kept_positions(state):
        assert not set(at) & set(found) and len(set(found)) == len(found)
        assert all(sinks <= p < size for p in found)
    coded = state.store.tokens
    count, where = int(coded.length[0]), coded.positions
    for j, positions in enumerate(np.asarray(where.position[0, :, :count])):
        heads = np.full(count, j) if where.owner is None else np.asarray(where.owner[0, 0, :count])
        for buffer, of in ((coded.k, stream.k), (coded.v, stream.v)):
            np.testing.assert_allclose(buffer[0, j, :count], of[positions, heads], atol=1e-6)


def kept_positions(state, heads=SPEC.kv_heads) -> list[list[int]]:
    """Positions of the selected tokens of each head, sorted."""
    coded = state.store.tokens
    count, position = int(coded.length[0]), np.asarray(coded.positions.position[0])
    if coded.positions.owner is None:
        return [sorted(position[j, :count].tolist()) for j in range(position.shape[0])]
    owner = np.asarray(coded.positions.owner[0, 0, :count])
    return [sorted(position[0, :count][owner == h].tolist()) for h in range(heads)]


@dataclasses.dataclass
class Rule:
    """What the oracle needs to know of a rule.

    prompt(stream, length) -> scores [K, S]; vote(p [G, S'], attended) -> [S'] of one query;
    budgets(scores: list of arrays, one a head) -> tokens of each head; inform(score, k, v, moments) -> score.
    """

    prompt: object
    vote: object
    budget: int
    sinks: int
    recent: int
    decay: float = 1.0
    budgets: object = None
    inform: object = None
    correct: bool = False
    informed_prompt: bool = False
    budgets_by_attention: bool = False


class Sums:
    """Moments of a head as a list of evicted tokens."""

    def __init__(self, dim):
        self.tokens, self.dim = [], dim

    def model(self):
        """v_bar and S~ / (n sqrt d), zero of nothing."""
        if not self.tokens:
            return np.zeros(self.dim), np.zeros((self.dim, self.dim))
        k, v = (np.stack(x) for x in zip(*self.tokens, strict=True))
        slope = v.T @ (k - k.mean(0))
        slope[np.abs(slope) < 1e-6] = 0
        return v.mean(0), slope / (len(k) * np.sqrt(self.dim))

    def partial(self, q):
        """out and log Z^."""
        if not self.tokens:
            return np.zeros(self.dim), -np.inf
        mean, slope = self.model()
        k = np.stack([k for k, _ in self.tokens])
        return mean + slope @ q, np.log(len(k)) + q @ k.mean(0) / np.sqrt(self.dim)


def residual(score, k, v, sums):
    """Equation 10."""
    mean, slope = sums.model()
    return score * np.linalg.norm(v - mean - k @ slope.T, axis=-1)


def evict(rule, heads, sums, stream, candidates, first=False):
    """Keep of each head's candidates (dict position -> score) the best; the rest goes to the sums."""
    scores, votes = [], []
    for h, found in enumerate(candidates):
        at = sorted(found)
        score = np.array([found[p] for p in at])
        if rule.inform and len(at):
            known = sums[h]
            if first and rule.informed_prompt:
                known = Sums(stream.k.shape[2])
                known.tokens = [(stream.k[p, h], stream.v[p, h]) for p in at]
            score = rule.inform(score, stream.k[at, h], stream.v[at, h], known)
        scores.append(score)
        votes.append(np.array([found[p] for p in at]))
    budget = rule.budget - rule.sinks - rule.recent
    counts = rule.budgets(votes if rule.budgets_by_attention else scores, budget) if rule.budgets else [budget] * len(scores)
    for h, found in enumerate(candidates):
        at = np.array(sorted(found), int)
        best = set(at[np.argsort(-scores[h], kind="stable")[: counts[h]]].tolist())
        for p in found:
            if p not in best:
                sums[h].tokens.append((stream.k[p, h], stream.v[p, h]))
        heads[h] = {p: s for p, s in found.items() if p in best}


def simulate(rule: Rule, stream: Stream, prompt: int, refresh_every: int):
    """The cache that results, as positions of each head, and the outputs of the decoded queries."""
    size, kv, dim = len(stream.q), stream.k.shape[1], stream.k.shape[2]
    group = stream.q.shape[1] // kv
    start = rule.prompt(stream, prompt)
    sums = [Sums(dim) for _ in range(kv)]
    first = min(rule.sinks, prompt)
    near = [{p: start[h, p] for p in range(prompt) if p < first or p >= max(prompt - rule.recent, first)}
            for h in range(kv)]
    heads = [{} for _ in range(kv)]
    middle = [{p: start[h, p] for p in range(prompt) if p not in near[h]} for h in range(kv)]
    evict(rule, heads, sums, stream, middle, first=True)
    outs = np.zeros((size - prompt, kv * group, dim))
    for t in range(prompt, size):
        if t > prompt and (t - prompt) % refresh_every == 0:
            found = []
            for h in range(kv):
                tail = sorted(p for p in near[h] if p >= rule.sinks)
                leaving = tail[: max(len(tail) - rule.recent, 0)]
                found.append(heads[h] | {p: near[h].pop(p) for p in leaving})
            evict(rule, heads, sums, stream, found)
            for h in range(kv):
                near[h] = {p: rule.decay * s for p, s in near[h].items()}
                heads[h] = {p: rule.decay * s for p, s in heads[h].items()}
        for h in range(kv):
            near[h][t] = 0.0
            at = sorted(near[h] | heads[h])
            q = stream.q[t, h * group : (h + 1) * group]
            logits = q @ stream.k[at, h].T / np.sqrt(dim)
            total = np.zeros(group)
            for g in range(group):
                out, lse = sums[h].partial(q[g]) if rule.correct else (0.0, -np.inf)
                total[g] = np.logaddexp.reduce([*logits[g], lse, stream.sinks[h * group + g]])
                outs[t - prompt, h * group + g] = (
                    np.exp(logits[g] - total[g]) @ stream.v[at, h] + np.exp(lse - total[g]) * out
                )
            for p, vote in zip(at, rule.vote(np.exp(logits - total[:, None]), t + 1), strict=True):
                (near if p in near[h] else heads)[h][p] += vote
    return [sorted(x) for x in heads], outs


# ---- scores of a prompt, from the papers -------------------------------------------------------------------------------


def attention_matrix(stream, length):
    """Causal probabilities `[N, S, S]`."""
    group = stream.q.shape[1] // stream.k.shape[1]
    k = np.repeat(stream.k[:length], group, axis=1)
    logits = np.einsum("tnd,snd->nts", stream.q[:length], k) / np.sqrt(k.shape[-1])
    return softmax(np.where(np.tri(length, dtype=bool), logits, -np.inf), stream.sinks[:, None, None])


def by_group(x, kv):
    return x.reshape(kv, -1, *x.shape[1:])


def h2o_scores(stream, length):
    return by_group(attention_matrix(stream, length).sum(1), stream.k.shape[1]).sum(1)


def scissorhands_scores(history):
    def scores(stream, length):
        p = by_group(attention_matrix(stream, length), stream.k.shape[1]).mean(1)
        seen = np.arange(length) + 1
        return (p > 1 / seen[:, None])[:, max(length - history, 0) :].sum(1).astype(float)

    return scores


def snapkv_scores(window, recent, pool, kernel, group_first=False, chunk=1):
    def scores(stream, length):
        kv = stream.k.shape[1]
        votes = by_group(attention_matrix(stream, length)[:, -window:].sum(1), kv)
        votes[..., length - recent :] = 0
        if group_first:
            votes = votes.sum(1, keepdims=True)
        out = votes.copy()
        half = kernel // 2
        for i in range(length if pool != "none" else 0):
            around = votes[..., max(i - half, 0) : i + half + 1]
            out[..., i] = around.max(-1) if pool == "max" else around.sum(-1) / kernel
        out = out.sum(1)
        for i in range(0, length, chunk):
            out[:, i : i + chunk] = out[:, i : i + chunk].sum(-1, keepdims=True) / chunk
        return out

    return scores


def official_budgets(alpha):
    """Algorithm 2 of Ada-KV's code."""
    def budgets(scores, budget):
        kv = len(scores)
        if sum(map(len, scores)) <= kv * budget:
            return [len(s) for s in scores]
        ranked = sorted(((-s, h, i) for h in range(kv) for i, s in enumerate(scores[h])))
        best = [0] * kv
        for _, h, _ in ranked[: kv * budget]:
            best[h] += 1
        return [round(c * (1 - alpha) + int(budget * alpha)) for c in best]

    return budgets


def sure_budgets(floor):
    """kvpress: the best `floor` of each head, then the best of all."""
    def budgets(scores, budget):
        kv = len(scores)
        counts = [min(floor, len(s)) for s in scores]
        rest = []
        for h, s in enumerate(scores):
            order = np.argsort(-s, kind="stable")[counts[h] :]
            rest += [(-s[i], h, i) for i in order]
        for _, h, _ in sorted(rest)[: max(kv * budget - sum(counts), 0)]:
            counts[h] += 1
        return counts

    return budgets


def total(p, attended):
    return p.sum(0)


def above(p, attended):
    return (p.mean(0) > 1 / attended).astype(float)
