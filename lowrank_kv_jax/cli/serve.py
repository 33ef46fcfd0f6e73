"""`lowrank-kv serve`: OpenAI's completions and chat API on compressed caches."""

import argparse
import ipaddress
import sys
from typing import Any

HELP = "an OpenAI-compatible server on compressed caches"
LAST_STEP = 10.0
"""Seconds that the step which is being made may go on for, once the server has ended."""


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the command."""
    from lowrank_kv_jax.cli.options import add_model_options
    from lowrank_kv_jax.storage.cache_dtype import CACHE_DTYPES, default_cache_dtype

    parser = subparsers.add_parser(
        "serve", help=HELP,
        description="Speaks OpenAI's completions and chat API, streaming included, until Ctrl-C. No key is asked for: "
                    "whoever reaches the port may ask.",
    )
    add_model_options(parser)
    parser.add_argument("--method", default="full", metavar="SPEC", help="e.g. kivi:bits=4 (%(default)s)")
    parser.add_argument("--bases", metavar="DIR", help="of `lowrank-kv calibrate`, for methods that need them")
    parser.add_argument("--calibrate", nargs="+", metavar="TEXT",
                        help="without --bases: what to fit them to; by default Python's language reference")
    parser.add_argument("--memory", metavar="BYTES",
                        help="that all caches and bases may take, e.g. 256MiB: as many rows as fit")
    parser.add_argument("--slots", type=int, metavar="N",
                        help="requests in flight, of each prompt length; with --memory, at most (8, with --memory 64)")
    parser.add_argument("--prompt", type=int, nargs="+", default=[1024], metavar="N",
                        help="tokens of the longest prompt; several make rows of several sizes (1024)")
    parser.add_argument("--room", type=int, default=256, metavar="N",
                        help="tokens behind a prompt, the longest answer (%(default)s)")
    parser.add_argument("--prefixes", type=int, default=0, metavar="N",
                        help="rows that keep shared prefixes (the field `prefix`); with --memory at most one of four "
                             "and those that fit beyond --slots (%(default)s)")
    parser.add_argument("--admits", type=int, metavar="N",
                        help="prompts of each length that are prefilled between two blocks, at most")
    parser.add_argument("--prefill-chunk", type=int, metavar="N",
                        help="read prompts N tokens at a time, so that those in flight wait for no more; by default as a "
                             "whole")
    parser.add_argument("--block", type=int, metavar="N",
                        help="tokens that are decoded, and told, at a time; by default as many as the method asks for "
                             "(32, transform 16)")
    parser.add_argument("--cache-dtype", choices=CACHE_DTYPES, default=default_cache_dtype(), help="(%(default)s)")
    parser.add_argument("--mesh", metavar="AXES",
                        help="lay weights and caches out over devices, e.g. data=2,model=4 or tokens=4")
    parser.add_argument("--warm-up", action="store_true",
                        help="compile for all sizes of prompts before the first request; minutes on a CPU")
    parser.add_argument("--host", default="127.0.0.1", help="(%(default)s, which this machine alone reaches)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes one that is free (%(default)s)")
    parser.add_argument("--name", help="of the model, for clients; by default as it was loaded")
    parser.add_argument("--queue", type=int, default=64, metavar="N",
                        help="requests that may wait for a row; more are refused (%(default)s)")
    parser.add_argument("--max-body", default="1MiB", metavar="BYTES", help="of a request (%(default)s)")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Serve until it is interrupted.

    Raises:
        ValueError, OSError: as `load_model`, `parse_method`, `load_bases`, `Engine` and `bind`.
        RuntimeError: the engine failed.
    """
    from lowrank_kv_jax.checks.extras import check_extra
    from lowrank_kv_jax.cli.options import load_from
    from lowrank_kv_jax.methods.parse import parse_method
    from lowrank_kv_jax.serving.plan import parse_bytes
    from lowrank_kv_jax.storage.sharding import make_mesh

    for package in ("starlette", "uvicorn"):
        check_extra(package, "serve")
    method, most_body = parse_method(args.method), parse_bytes("--max-body", args.max_body)
    memory = None if args.memory is None else parse_bytes("--memory", args.memory)
    mesh = None if args.mesh is None else make_mesh(args.mesh)
    from lowrank_kv_jax.serving.http.server import bind

    with bind(args.host, args.port) as bound:  # before the model is loaded: the port may be taken
        model = load_from(args, mesh)
        if model.tokenizer is None:
            raise ValueError(f"model {model.name!r} has no tokenizer: serve needs one")
        return _serve(args, model, _engine(args, model, method, memory, mesh), bound, most_body)


def _engine(args: argparse.Namespace, model: Any, method: Any, memory: int | None, mesh: Any) -> Any:
    from lowrank_kv_jax.cli.prompts import bases_from
    from lowrank_kv_jax.serving.engine import Engine

    engine = Engine(
        model, method, bases=bases_from(args, model, method), memory=memory, slots=args.slots, prompt=args.prompt,
        room=args.room, prefixes=args.prefixes, admits=args.admits, prefill_chunk=args.prefill_chunk, block=args.block,
        dtype=args.cache_dtype, mesh=mesh,
    )
    if args.warm_up:
        print("[compiling for all sizes of prompts]", file=sys.stderr, flush=True)
        engine.warm_up()
    return engine


def _serve(args: argparse.Namespace, model: Any, engine: Any, bound: Any, most_body: int) -> int:
    from lowrank_kv_jax.serving.http.app import Api
    from lowrank_kv_jax.serving.http.engine_thread import EngineThread
    from lowrank_kv_jax.serving.http.server import Server, url_of

    name, url = args.name or model.name, url_of(bound)
    thread = EngineThread(engine, args.queue)
    api = Api(model, thread, name, args.method, args.room, most_body)

    def started() -> None:
        pools = zip(engine.slots, engine.layouts, strict=True)
        rows = ", ".join(f"{count} for prompts of {layout.prompt}" for count, layout in pools)
        print(f"serving {name} through {args.method} at {url}/v1; rows: {rows} tokens, {engine.bytes / 2**20:.1f} MiB; "
              "Ctrl-C ends it", flush=True)
        if not ipaddress.ip_address(bound.getsockname()[0].split("%")[0]).is_loopback:
            print(f"lowrank-kv: warning: --host {args.host}: other machines reach it, and no key is asked for",
                  file=sys.stderr, flush=True)

    server = Server(api.app(), thread, started)
    try:
        server.run(sockets=[bound])
    finally:
        thread.join(LAST_STEP)  # Python aborts where it ends while a thread is within XLA
    if server.interrupted:
        raise KeyboardInterrupt
    if thread.error is not None:
        raise RuntimeError(f"the engine failed: {type(thread.error).__name__}: {thread.error}") from thread.error
    return 0
