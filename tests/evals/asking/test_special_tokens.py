"""Special tokens are no part of an answer, as in the published scripts; what ends one may be spelled by them."""

import dataclasses

import pytest
from suites import METHODS, Letters, Loaded, questions

from lowrank_kv_jax.evals.asking.suite import Suite, evaluate


@dataclasses.dataclass(frozen=True)
class Marked(Letters):
    """Letters, one of which is a special token."""

    special: str

    def decode(self, ids, skip_special_tokens=False):
        marked = "" if skip_special_tokens else "<|mark|>"
        return super().decode(ids).replace(self.special, marked)


def test_predictions_are_without_special_tokens():
    suite = Suite("eval test", questions(2, new_tokens=8))
    plain = [r["prediction"] for r in evaluate(Loaded(), {"full": METHODS["full"]}, suite)]
    marked = Loaded(tokenizer=Marked(plain[0][2]))
    records = evaluate(marked, {"full": METHODS["full"]}, suite)
    assert [r["prediction"] for r in records] == [text.replace(plain[0][2], "") for text in plain]


def test_a_special_token_is_not_a_line_and_ends_nothing():
    (plain,) = evaluate(Loaded(), {"full": METHODS["full"]}, Suite("eval test", questions(1, new_tokens=8)))
    special, seen = plain["prediction"][0], []
    asked = dataclasses.replace(questions(1, new_tokens=8)[0], complete=lambda text: seen.append(text) or "mark" in text)
    (record,) = evaluate(Loaded(tokenizer=Marked(special)), {"full": METHODS["full"]}, Suite("eval test", (asked,)))
    assert record["answer_tokens"] == 8 and not any("mark" in text for text in seen)


def test_lm_eval_stops_at_a_special_token():
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from lowrank_kv_jax.evals.lm_harness.model import LowRankKV

    def generated(tokenizer, **settings):
        model = dataclasses.replace(Loaded(), tokenizer=tokenizer)
        adapter = LowRankKV(model, cache_dtype="float32", batch_size=1, max_length=64, progress=False)
        (text,) = adapter.generate_until([Instance("generate_until", {}, ("a question", {"max_gen_toks": 8, **settings}), 0)])
        return text

    class Ending(Letters):
        eos_token_id, special = 0, ""

    class Special(Ending):
        def decode(self, ids, skip_special_tokens=False):
            return Letters().decode(ids).replace(self.special, "" if skip_special_tokens else "<|mark|>")

    plain = generated(Ending())
    Special.special = plain[3]
    assert generated(Special()) == plain.replace(plain[3], "")
    assert generated(Special(), until=["<|mark|>"]) == plain[: plain.index(plain[3])]
