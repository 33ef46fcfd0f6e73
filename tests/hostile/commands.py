"""Commands run in this process, and how a refused one ends."""

from lowrank_kv_jax.cli import main


def refused_command(capsys, argv, *words, code=2):
    """Run what must be refused: nothing on standard output, one line on standard error that holds the words."""
    assert main(argv) == code
    shown = capsys.readouterr()
    told = [text for text in shown.err.splitlines() if not text.startswith("lowrank-kv: warning: ")]
    assert shown.out == "" and len(told) == 1 and told[0].startswith("lowrank-kv: error: "), shown
    for word in words:
        assert word in told[0], told[0]
    return told[0]
