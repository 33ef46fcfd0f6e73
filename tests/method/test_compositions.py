"""Every codec with every selection, with and without a summary: what compositions promise to those who generate.

Few heads with short exact ends, so that most tokens are coded; and eight kv heads, where some methods group heads, with
the settings that methods come with.
"""

import dataclasses

import pytest
from helpers import PLAIN, small_configuration

import lowrank_kv_jax as lkv
from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.methods import REGISTRY, compose
from lowrank_kv_jax.methods.parse import spell_method
from lowrank_kv_jax.summaries.component import Summary
from lowrank_kv_jax.testing import PROMISES

FEW = dataclasses.replace(PLAIN, num_layers=2, windows=(None, None))
EIGHT = dataclasses.replace(
    PLAIN, num_layers=1, windows=(None,), q_heads=16, kv_heads=8, head_dim=4, rope=RopeSpec(10000.0, 4)
)
LENGTHS = {FEW: (96, 70), EIGHT: (256, 230)}  # in the first, half of a prompt's tokens go; in the second, three quarters
BLOCK = 8

CODECS = [None, *sorted(name for name, cls in REGISTRY.items() if cls.stage == "codec")]
SELECTIONS = sorted(name for name, cls in REGISTRY.items() if cls.stage == "selection")


def composed(config, codec, selection, summary):
    """The composition, of selections that decode as they do by default, or else that keep what is decoded.

    Raises:
        ValueError: the parts do not go together.
    """
    small = small_configuration if config is FEW else lambda cls: cls()
    # kivi has no ends of its own behind a selection
    parts = (
        None if codec is None else REGISTRY[codec]() if codec == "kivi" else small(REGISTRY[codec]),
        small(REGISTRY[selection]), Summary() if summary else None,
    )
    try:
        return compose(*parts)
    except ValueError:
        if "decoding" not in {field.name for field in dataclasses.fields(parts[1])} or parts[1].decoding == "keep":
            raise
        return compose(parts[0], dataclasses.replace(parts[1], decoding="keep"), parts[2])


def refusal(config, *names):
    """Why the parts do not go together, or None."""
    try:
        composed(config, *names)
    except ValueError as error:
        return str(error)


PARTS = [(codec, rule, summary) for codec in CODECS for rule in SELECTIONS for summary in (False, True)]
QUICK = {(EIGHT, "palu", "h2o", False)}  # the whole product is slow; of another shape of state one with a summary is below


def cases():
    for config, heads in ((FEW, "few"), (EIGHT, "eight")):
        for names in PARTS:
            if refusal(config, *names) is None:
                case = (config, *names)
                label = "+".join(filter(None, (*names[:2], "moments" if names[2] else None)))
                yield pytest.param(*case, id=f"{heads}-{label}", marks=() if case in QUICK else pytest.mark.slow)


def keeps_its_promises(method, config):
    for promise in PROMISES:
        promise(method, config, LENGTHS[config])


@pytest.mark.parametrize("config, codec, selection, summary", list(cases()))
def test_what_composes_keeps_its_promises(config, codec, selection, summary):
    keeps_its_promises(composed(config, codec, selection, summary), config)


@pytest.mark.parametrize("spec", [
    pytest.param("transform:bits=2,group=2,sinks=2,recent=4+kvzip:keep=0.5,recent=8", marks=pytest.mark.slow),
    pytest.param("transform:bits=3,group=2,heads=per_head,rope=post,sinks=2,recent=4+adakv:keep=0.5,recent=8+moments", marks=pytest.mark.slow),
    pytest.param("transform:smaller=2,group=2,sinks=2,recent=4", marks=pytest.mark.slow),
    pytest.param("transform:bits=2,heads=per_head,rope=post,steps=prompt,sinks=2,recent=4+adakv:keep=0.5,recent=8", marks=pytest.mark.slow),
    pytest.param("transform:smaller=2,group=2,steps=prompt,sinks=2,recent=4", marks=pytest.mark.slow),
    pytest.param("transform:bits=2,group=2,steps=prompt,sinks=2,recent=4+kvzip:keep=0.5,recent=8+moments", marks=pytest.mark.slow),
    "transform:bits=2,group=2,kv=joint,sinks=2,recent=4+kvzip:keep=0.5,recent=8+moments",
    *(pytest.param(f"transform:{fields},kv=joint,sinks=2,recent=4{rule}", marks=pytest.mark.slow)
      for fields in ("bits=3", "bits=3,group=2,heads=per_head,rope=post,steps=prompt", "smaller=2,group=2")
      for rule in ("", "+snapkv:keep=0.5,recent=8", "+adakv:keep=0.5,recent=8+moments", "+quest:keep=0.5,page=8")
      if not rule or not fields.startswith("smaller")),
    *(pytest.param(f"{codec}:bits=2.5,sinks=2,recent=4{rule}", marks=pytest.mark.slow)
      for codec in ("ojakv", "static-pca", "palu", "streamingkv", "single-svd", "xkv")
      for rule in ("", "+snapkv:keep=0.5,recent=8", "+h2o:keep=0.5,recent=8+moments", "+quest:keep=0.5,page=8")
      if not rule.startswith("+quest") or codec in ("ojakv", "xkv")),
    *(pytest.param(f"{codec}bits=2.5,sinks=2,recent=4+adakv:keep=0.5,recent=8+moments", marks=pytest.mark.slow)
      for codec in ("ojakv:", "static-pca:", "streamingkv:head_group=1,rank=0.5,")),
])
def test_codes_with_bits_of_their_own_keep_their_promises(spec):
    keeps_its_promises(lkv.parse_method(spec), FEW)


def test_what_does_not_compose_is_refused_in_a_line_that_names_both():
    for config in (FEW, EIGHT):
        reasons = {names: refusal(config, *names) for names in PARTS}
        for (codec, selection, summary), reason in reasons.items():
            if reason is not None:
                others = [name for name in (codec, summary and "moments") if name]
                assert "\n" not in reason and selection in reason and any(name in reason for name in others)
        there = {names[:2] for names, reason in reasons.items() if reason is None and names[0] is not None}
        assert len(there) == 93  # of 135; it may only grow


def test_compositions_are_spelled_as_they_are_read():
    for names in PARTS:
        if refusal(FEW, *names) is None:
            method = composed(FEW, *names)
            assert lkv.parse_method(spell_method(method)) == method
