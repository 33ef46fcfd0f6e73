"""The tables of the commands."""

from pathlib import Path

import lowrank_kv_jax
from lowrank_kv_jax.cli.tables import print_table

CLI = Path(lowrank_kv_jax.__file__).parent / "cli"


def test_texts_stand_on_the_left_and_numbers_on_the_right(capsys):
    print_table("made up", ("method", "of\ntwo lines"), [("full", "1.0"), None, ("a:b=" + 40 * "c", "22.0")])
    title, *lines = capsys.readouterr().out.rstrip("\n").split("\n")
    assert title.strip() == "made up" and len({len(line) for line in lines}) == 1
    cells = [[cell for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [left.rstrip() for left, _ in cells] == [" full", " a:b=" + 40 * "c"]
    assert [right for _, right in cells] == ["       1.0 ", "      22.0 "]
    assert sum(line.startswith("├") for line in lines) == 1  # the rule between them


def test_texts_may_be_named(capsys):
    print_table("made up", ("number", "a text"), [("1", "x")], texts=("a text",))
    assert "│      1 │ x      │" in capsys.readouterr().out


def test_one_module_makes_tables():
    assert [path.name for path in CLI.rglob("*.py") if "rich.table" in path.read_text()] == ["tables.py"]
