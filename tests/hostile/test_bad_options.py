"""Every option of every command, given what it cannot take: by a rule over the parsers."""

import argparse
import itertools

import pytest
from commands import refused_command

from lowrank_kv_jax.cli import COMMANDS, _parser

FILLED = {"--method": ["ojakv"], "--out": ["{out}"], "--json": ["{json}"], "--prompt": ["x"], "RESULTS": ["x"]}
"""What commands cannot do without."""
REFUSES = ("must ", "invalid ", "not a number", "give ", "at least ", "allowed are ")


def leaves():
    """The words of each command, and its parser."""
    for name in COMMANDS:
        yield from _below((name,), _children(_parser([name]))[name])


def _below(words, parser):
    children = _children(parser)
    if not children:
        yield words, parser
    for name, child in children.items():
        yield from _below((*words, name), child)


def _children(parser):
    return next((a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)), {})


def bad_values(action):
    if action.choices is not None:
        return ("nothing",)
    if action.type is int:
        return ("x", "1.5", "-1", "1" + "0" * 12, "9" * 5000)
    if action.type is float:
        return ("x", "nan", "inf", "-1", "1e30")
    return ()


PARSERS = dict(leaves())
TABLE = [
    (words, action.option_strings[0], list(bad_values(action)))
    for words, parser in PARSERS.items() for action in parser._actions if action.option_strings and list(bad_values(action))
]


def required(words, option, tmp_path):
    parser = PARSERS[words]
    needed = [a for a in parser._actions if a.required and (a.option_strings or [None])[0] != option]
    filled = [([*a.option_strings[:1], *FILLED[a.option_strings[0]]] if a.option_strings else FILLED[a.metavar]) for a in needed]
    if words == ("generate",):
        filled.append(["--prompt", "x"])
    given = itertools.chain.from_iterable(filled)
    return [word.format(out=tmp_path / "out", json=tmp_path / "r.jsonl") for word in given]


@pytest.mark.parametrize("words, option, values", TABLE, ids=[" ".join((*words, option)) for words, option, _ in TABLE])
def test_an_option_says_what_it_takes(words, option, values, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lowrank_kv_jax.models.load.load_model", None)
    for value in values:
        line = refused_command(capsys, [*words, *required(words, option, tmp_path), option, value])
        name, shown = option.removeprefix("--"), value.split("e")[0][:12]
        named = (f"--{name} {shown}", f"--{name}: ", f"{name.replace('-', '_')}={shown}")
        assert any(text in line for text in named), line
        assert shown in line and any(word in line for word in REFUSES), line


def test_the_rule_reaches_every_command():
    assert {words[0] for words, _, _ in TABLE} == set(COMMANDS) - {"methods", "report"}
    assert sum(len(values) for _, _, values in TABLE) > 300
