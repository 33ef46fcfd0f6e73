"""Bodies by the table: what a field may hold, and how another value is told. No server, no model."""

import json

import pytest

from lowrank_kv_jax.serving.http.asked import read_asked
from lowrank_kv_jax.serving.http.refusal import Refusal, as_json
from lowrank_kv_jax.serving.http.words import Words

TURN = {"role": "user", "content": "x"}
HALF = json.loads('"\\ud800"')

BOTH = (  # of completions and of chats
    ({"n": 2}, "n=2: must be null or 1, this server has nothing else"), ({"n": True}, "n=True: must be null or 1"),
    ({"n": "1"}, "n='1': must be null or 1"), ({"model": 3}, "model=3: must be a string"), ({"model": None}, "the field 'model' is missing"),
    ({"model": "gpt-4"}, "model='gpt-4': is not served here, only 'tiny'"), ({"nothing": 1}, "unknown field 'nothing': allowed are "),
    ({"temperature": "hot"}, "temperature='hot': must be an integer or a number"), ({"temperature": 2.5}, "temperature=2.5: must be in 0..2"),
    ({"temperature": -1}, "temperature=-1: must be in 0..2"), ({"temperature": True}, "temperature=True: must be"),
    ({"top_p": 2}, "top_p=2: must be in 0..1"), ({"top_k": 0}, "top_k=0: must be at least 1"), ({"seed": 1.5}, "seed=1.5: must be an integer"),
    ({"seed": 2**32}, "seed=4294967296: must be in 0..4294967295"), ({"max_tokens": 0}, "max_tokens=0: must be at least 1"),
    ({"max_tokens": 1.0}, "max_tokens=1.0: must be an integer"), ({"stop": 5}, "stop=5: must be a string or a list"),
    ({"stop": [""]}, "stop=['']: must be a text that is not empty"), ({"stop": list("abcdefghi")}, "at most 8 of them"),
    ({"stop": HALF}, "is half of a surrogate pair"), ({"stream": 1}, "stream=1: must be true or false"),
    ({"stream_options": {"include_usage": True}}, "allowed with stream=true only"), ({"stream": True, "stream_options": []}, "must be an object"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage=1: must be true or false"),
    ({"presence_penalty": 0.5}, "presence_penalty=0.5: must be null or 0"), ({"logit_bias": {"5": 1}}, "must be null or {}"),
    ({"tools": [{}]}, "tools=[{}]: must be null or []"), ({"response_format": {"type": "json_object"}}, 'must be null or {"type": "text"}'),
    ({"logprobs": True}, "logprobs=True: must be null or false"), ({"user": 5}, "user=5: must be a string"),
)
COMPLETIONS = (
    ({"prompt": None}, "prompt=None: must be a text or its token ids, of one prompt"), ({"prompt": ["a", "b"]}, "prompt=['a', 'b']: must be"),
    ({"prompt": [1, True]}, "must be a text or its token ids"), ({"prompt": {}}, "prompt={}: must be a string or a list"), ({"prompt": ""}, "not empty"),
    ({"prompt": "a" + HALF}, "character 1 is half of a surrogate pair"), ({"prefix": 1}, "prefix=1: must be a string"), ({"prefix": ""}, "not empty"),
    ({"echo": True}, "echo=True: must be null or false"), ({"messages": []}, "unknown field 'messages'"),
)
CHATS = (
    ({"messages": None}, "messages=None: must be a list of at least one"), ({"messages": ["x"]}, "messages[0]='x': must be an object"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role='tool': must be one of system, developer, user, assistant"),
    ({"messages": [TURN, {"role": "user"}]}, "messages[1].content=None: must be a text, or a list of parts"), ({"prompt": "x"}, "unknown field 'prompt'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]={'type': 'image_url'}: must be"),
    ({"messages": [{**TURN, "tool_calls": [1]}]}, "messages[0].tool_calls=[1]: must be null"), ({"max_completion_tokens": 0}, "max_completion_tokens=0"),
)


def body(chat, **change):
    return {"model": "tiny", **({"messages": [TURN]} if chat else {"prompt": "x"}), **change}


CASES = [(chat, *row) for chat, own in ((False, COMPLETIONS), (True, CHATS)) for row in (*BOTH, *own)]


@pytest.mark.parametrize("chat, change, words", CASES, ids=[f"{'chat' if chat else 'text'}-{words[:40]}" for chat, _, words in CASES])
def test_a_field_says_what_it_takes(chat, change, words):
    with pytest.raises(Refusal) as caught:
        read_asked(body(chat, **change), "tiny", chat)
    line = caught.value.message
    assert words in line and "\n" not in line and len(line) < 1000, line
    assert caught.value.status == (404 if "not served" in words else 400)
    as_json(caught.value.body).encode("ascii")


def test_what_changes_nothing_is_taken():
    idle = {"n": 1, "presence_penalty": 0.0, "logit_bias": {}, "tools": [], "user": "me", "metadata": {"a": "b"}, "store": False,
            "response_format": {"type": "text"}, "logprobs": False, "seed": None, "stop": None, "stream_options": None, "top_p": 1}
    for chat in (False, True):
        asked = read_asked(body(chat, **idle), "tiny", chat)
        assert asked == read_asked(body(chat), "tiny", chat) and asked.drawing == {"temperature": 1.0, "top_p": 1, "top_k": None, "seed": None}
        assert (asked.tokens, asked.stream, asked.usage, asked.stop) == (None, False, False, ())
        assert asked.tokens_by_default == (None if chat else 16)


class Pieces:
    """A tokenizer whose token is a byte."""

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("text, stops, end", (("größer & größer", (), None), ("a b END c", ("END",), "a b "), ("aab aaab", ("aaab",), "aab "), ("x EN", ("END",), None)))
def test_nothing_is_shown_that_is_taken_back(text, stops, end):
    ids, words, shown = list(text.encode()), Words(Pieces(), stops), ""
    for n in range(1, len(ids) + 1):
        if end is not None and any(stop in text.encode()[:n].decode(errors="replace") for stop in stops):
            break
        new = words.add(ids[:n])
        shown += new
        assert "\ufffd" not in new and text.startswith(shown) and len(shown) <= len(text if end is None else end)
    assert shown + words.end(text if end is None else end) == (text if end is None else end)
