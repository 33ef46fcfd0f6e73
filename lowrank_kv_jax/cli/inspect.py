"""`lowrank-kv inspect`: which tokens of a prompt each layer holds, as a picture and a table."""

import argparse

HELP = "which tokens of a prompt each layer holds, and how: a picture and a table"


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the command."""
    from lowrank_kv_jax.cli.options import add_model_options
    from lowrank_kv_jax.cli.prompts import add_prompt_options

    parser = subparsers.add_parser(
        "inspect", help=HELP,
        description="Reads a prompt through the model and shows which of its tokens each layer then holds exactly, as "
                    "codes, or not at all, and how much of the last queries' attention falls on what is held.",
    )
    add_model_options(parser)
    parser.add_argument("--method", default="full", metavar="SPEC", help="e.g. snapkv:keep=0.25 (%(default)s)")
    add_prompt_options(parser)
    parser.add_argument("--heads", action="store_true", help="draw every kv head; otherwise a layer's are averaged")
    parser.add_argument("--out", metavar="PNG", default="inspect.png", help="the picture (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="append one JSON object")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the table and draw the picture.

    Raises:
        ValueError, OSError: as `parse_method`, `load_model`, `prompts` and `prefill`.
    """
    from lowrank_kv_jax.cli.options import append_records, check_outputs, check_plot, load_from
    from lowrank_kv_jax.cli.prompts import bases_from, encode_texts, read_prompts
    from lowrank_kv_jax.evals.held.plot import plot_held
    from lowrank_kv_jax.evals.held.prompt import hold_prompt
    from lowrank_kv_jax.methods.parse import parse_method

    method = parse_method(args.method)
    check_outputs(args)
    check_plot(args.out, "--out")
    texts = read_prompts(args)
    model = load_from(args)
    (ids,) = encode_texts(model, texts, args.chat)
    if len(ids) > model.config.context:
        raise ValueError(f"the prompt has {len(ids)} tokens, the model's context is {model.config.context}")
    found = hold_prompt(model, method, ids, bases=bases_from(args, model, method), dtype=args.cache_dtype)
    size = found.size
    title = (f"{args.method}: what {model.name} holds of {len(ids)} tokens, {size.total / 2**20:.2f} MiB, "
             f"{size.smaller:.2f}x smaller than a full cache in 16 bits")
    rows = layer_rows(found)
    plot_held(args.out, title, found, by_head=args.heads)
    append_records(args, "inspect", [{
        "spec": args.method, "model": model.name, "length": len(ids), "cache_bytes": size.total,
        "full_cache_bytes": size.full, "bytes_per_token": size.per_token, "bytes_by_kind": size.by_kind,
        "smaller": size.smaller, "shared_bytes": size.shared, "summarised": found.summarised, "layers": rows,
    }])
    _print(title, rows, found.summarised, list(found.counts[0]))
    print(f"drew {args.out}")
    return 0


def layer_rows(found) -> list[dict]:
    """Of each layer: tokens held exactly, coded and gone (means over the kv heads), bytes, what its codec counts, and the
    share of attention or None."""
    import numpy as np

    from lowrank_kv_jax.method.held import Held

    rows = []
    for layer, (held, size) in enumerate(zip(found.held, found.layer_bytes, strict=True)):
        counts = {how.name.lower(): float((held == how).mean(0).sum()) for how in reversed(Held)}
        attention = found.attention[layer].mean()
        rows.append({"layer": layer, **counts, "bytes": size, **found.counts[layer],
                     "attention": float(attention) if np.isfinite(attention) else None})
    return rows


def _print(title: str, rows: list[dict], summarised: bool, counted: list[str]) -> None:
    from lowrank_kv_jax.cli.tables import print_table

    def line(name: str, row: dict) -> tuple[str, ...]:
        attention = "" if row["attention"] is None else f"{100 * row['attention']:.1f}"
        more = (f"{row[how]:.3g}" for how in counted)
        tokens = (f"{row[how]:.0f}" for how in ("exact", "coded", "gone"))
        return (name, *tokens, f"{row['bytes'] / 1024:.1f}", attention, *more)

    shares = [row["attention"] for row in rows if row["attention"] is not None]
    mean = {name: sum(row[name] for row in rows) / len(rows) for name in ("exact", "coded", "gone", "bytes", *counted)}
    mean = {**mean, "attention": sum(shares) / len(shares) if shares else None}
    heads = ("layer", "exact\ntokens", "coded\ntokens", "summarised\ntokens" if summarised else "dropped\ntokens", "KiB",
             "attention\non held, %", *counted)
    print_table(title, heads, [*(line(str(row["layer"]), row) for row in rows), None, line("mean", mean)])
