"""The one form of the tables that commands print."""

from collections.abc import Collection, Iterable, Sequence


def print_table(
    title: str, columns: Sequence[str], lines: Iterable[Sequence[str] | None], texts: int | Collection[str] = 1
) -> None:
    """Print a title, in one line however narrow its table is, and the table, wide where no terminal says otherwise.

    Args:
        lines: None draws a rule.
        texts: columns that stand on the left, the first so many or by name; the others are numbers.
    """
    from rich.console import Console
    from rich.table import Table

    left = columns[:texts] if isinstance(texts, int) else texts
    table = Table(header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    for line in lines:
        if line is None:
            table.add_section()
        else:
            table.add_row(*line)
    console = Console()
    console = console if console.is_terminal and console.width >= 100 else Console(width=200)
    console.print(title, style="italic", markup=False, highlight=False, soft_wrap=True)
    console.print(table)
