"""How a refusal reads: one line that holds the words expected of it."""

import pytest


def refused(call, *words, errors=(ValueError,)):
    """Call what must be refused; the line that says why."""
    with pytest.raises(errors) as caught:
        call()
    line = str(caught.value)
    for word in words:
        assert word in line, line
    assert "\n" not in line and len(line) < 2000, line
    return line
