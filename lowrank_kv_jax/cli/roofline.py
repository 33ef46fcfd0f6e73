"""`lowrank-kv roofline`: FLOPs and bytes of a decoded token, and the least time a device needs for them."""

import argparse

from lowrank_kv_jax.cli.options import add_model_options, append_records
from lowrank_kv_jax.cli.tables import print_table

HELP = "FLOPs and bytes of a decoded token of any method, counted without running it"
DEFAULT_METHODS = (
    "full", "kivi:int8", "kivi", "osp-static:rank=0.5", "osp:rank=0.5", "osp:rank=0.5,bits=8", "xkv:rank=0.25",
)


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = subparsers.add_parser("roofline", help=HELP, description=HELP + ".")
    add_model_options(parser)
    parser.add_argument("--methods", nargs="+", default=list(DEFAULT_METHODS), metavar="SPEC", help="(a few kinds)")
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096], metavar="N",
                        help="tokens in the cache (4096)")
    parser.add_argument("--batch", type=int, default=1, help="rows (%(default)s)")
    parser.add_argument("--device", default="h200", help="a100, h100, h200 or tpu-v5e, nominal figures (%(default)s)")
    parser.add_argument("--bandwidth", type=float, metavar="BYTES", help="bytes/s, instead of the device's")
    parser.add_argument("--flops", type=float, metavar="FLOPS", help="FLOP/s, instead of the device's")
    parser.add_argument("--json", metavar="FILE", help="append one JSON object for each row")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Count and print.

    Raises:
        ValueError: an unknown device, lengths beyond the model's context, methods that do not suit it.
    """
    from lowrank_kv_jax.cli.options import check_context, check_numbers, check_outputs, load_from
    from lowrank_kv_jax.evals.asking.methods import parse_methods
    from lowrank_kv_jax.evals.speed import roofline
    from lowrank_kv_jax.methods.parse import parse_method

    if args.device not in roofline.ROOFS:
        raise ValueError(f"--device {args.device}: allowed are {', '.join(roofline.ROOFS)}")
    for field in ("bandwidth", "flops"):
        if getattr(args, field) is not None and not getattr(args, field) > 0:
            raise ValueError(f"--{field} {getattr(args, field)}: must be positive")
    nominal = roofline.ROOFS[args.device]
    roof = roofline.Roof(args.bandwidth or nominal.bandwidth, args.flops or nominal.flops)
    check_numbers(args, lengths=1, batch=1)
    check_outputs(args)
    methods = parse_methods(args.methods)
    model = load_from(args)
    check_context(args, model, lengths=0)
    lines, rows = [], []
    for length in args.lengths:
        full = roofline.decode_cost(model.config, parse_method("full"), length, args.batch).seconds(roof)
        for spec, method in methods.items():
            cost = roofline.decode_cost(model.config, method, length, args.batch)
            cache, seconds = sum(cost.cache_bytes.values()), cost.seconds(roof)
            lines.append((
                spec, str(length), f"{cost.flops / 1e6:.1f}", f"{cost.bytes / 1e6:.0f}", f"{cache / 1e6:.1f}",
                f"{cost.flops / cost.bytes:.1f}", f"{seconds * 1e6:.1f}", cost.bound(roof)[:4], f"{full / seconds:.2f}",
            ))
            rows.append({
                "method": spec, "length": length, "flops": cost.flops, "attention_flops": cost.attention_flops,
                "weight_bytes": cost.weight_bytes, "cache_bytes": cache, "bytes_by_kind": cost.cache_bytes,
                "seconds": seconds, "bound": cost.bound(roof),
            })
    print_table(
        f"{model.name}, batch {args.batch}, bfloat16: a decode step at least; {roof.bandwidth / 1e12:g} TB/s, "
        f"{roof.flops / 1e12:g} TFLOP/s",
        ("method", "tokens", "MFLOP", "MB", "of that\ncache", "FLOP\n/byte", "us", "bound", "vs\nfull"), lines,
    )
    append_records(args, "roofline", rows, model=model.name, batch=args.batch, roof=roof._asdict())
    return 0
