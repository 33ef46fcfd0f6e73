"""Identifiers among text that is calibrated on."""

import re
import string
import uuid

import numpy as np
from character_tokenizer import Characters

from lowrank_kv_jax.calibration.identifiers import SHARE, identifier, with_identifiers

TEXTS = np.full((4, 4000), 7, np.int32)


class Bytes:
    """A token for each character."""

    def __call__(self, text: str, add_special_tokens: bool):
        assert not add_special_tokens
        return type("Encoded", (), {"input_ids": [1000 + ord(c) for c in text]})


def test_they_take_their_share_of_texts_of_one_length_and_follow_the_seed():
    found = with_identifiers(TEXTS, Bytes(), 3)
    assert found.shape == TEXTS.shape and found.dtype == np.int32 and (found[:, 0] == 7).all()
    assert abs((found != 7).mean() - SHARE) < 0.05
    assert not np.array_equal(found[0], found[1])
    np.testing.assert_array_equal(with_identifiers(TEXTS, Bytes(), 3), found)
    assert not np.array_equal(with_identifiers(TEXTS, Bytes(), 4), found)


def test_text_goes_on_where_it_was_left():
    text = np.arange(1, 901, dtype=np.int32)[None]
    found = with_identifiers(text, Bytes(), 0)[0]
    own = found[found < 1000]
    np.testing.assert_array_equal(own, np.arange(1, len(own) + 1))


def test_every_kind_is_drawn():
    rng = np.random.default_rng(0)
    drawn = [identifier(rng) for _ in range(400)]
    assert len(set(drawn)) > 390
    uuids = [x for x in drawn if re.fullmatch("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", x)]
    assert uuids and all(str(uuid.UUID(x)) == x for x in uuids)
    for characters, least in ((string.digits, 3), (string.ascii_lowercase, 4), (string.ascii_uppercase, 2)):
        assert sum(set(x) <= set(characters) and len(x) >= least for x in drawn) > 20
    for pattern in (r"\d{1,4}([.,:/-]\d{1,4}){1,5}", r"[a-z]{3,8}([._/@-][a-z]{3,8}){1,3}"):
        assert sum(re.fullmatch(pattern, x) is not None for x in drawn) > 20


def test_texts_stay_as_they_are_without_a_tokenizer_and_where_it_knows_no_character():
    class Mute:
        def __call__(self, text, add_special_tokens):
            return type("Encoded", (), {"input_ids": []})

    assert with_identifiers(TEXTS, None) is TEXTS
    np.testing.assert_array_equal(with_identifiers(TEXTS, Mute()), TEXTS)
    assert with_identifiers(TEXTS[:, :1], Characters()).shape == (4, 1)
