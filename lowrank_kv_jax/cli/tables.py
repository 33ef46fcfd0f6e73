"""Tables of the commands that print several."""

from collections.abc import Iterable, Sequence


def print_table(title: str, columns: Sequence[str], lines: Iterable[Sequence[str]], texts: int = 1) -> None:
    """Print a table; specs and other texts, the first columns, give way to numbers."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < texts else "right", no_wrap=i >= texts, overflow="fold")
    for line in lines:
        table.add_row(*line)
    console = Console()
    (console if console.is_terminal and console.width >= 100 else Console(width=160)).print(table)
