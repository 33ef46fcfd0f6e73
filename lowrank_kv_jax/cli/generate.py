"""`lowrank-kv generate`: text from a compressed cache, as it is made."""

import argparse
import sys
import time

HELP = "generate text from a compressed cache"


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the command."""
    from lowrank_kv_jax.cli.options import add_model_options
    from lowrank_kv_jax.cli.prompts import add_prompt_options

    parser = subparsers.add_parser("generate", help=HELP, description=HELP)
    add_model_options(parser)
    parser.add_argument("--method", default="full", metavar="SPEC", help="e.g. ojakv:rank=0.5 (%(default)s)")
    add_prompt_options(parser, several=True)
    parser.add_argument("--max-new-tokens", type=int, default=128, help="(%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)")
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prefill-chunk", type=int, metavar="N",
                        help="read prompts N tokens at a time and compress between them; by default as a whole")
    parser.add_argument("--by-layers", action="store_true",
                        help="compile a layer, not the whole model: the first tokens come sooner, the others later")
    parser.add_argument("--mesh", metavar="AXES",
                        help="lay weights and cache out over devices, e.g. data=2,model=3: prompts over data, kv heads "
                             "over model")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the text as it comes, then on standard error what it cost.

    Raises:
        ValueError, OSError: as `load_model`, `parse_method`, `load_bases` and `generate`.
    """
    from lowrank_kv_jax.cli.options import check_numbers, load_from
    from lowrank_kv_jax.cli.prompts import bases_from, encode_texts, read_prompts
    from lowrank_kv_jax.generation.generate import generate
    from lowrank_kv_jax.generation.prompts import PAD_TO, check_lengths, check_new_tokens
    from lowrank_kv_jax.generation.sampling import Sampler
    from lowrank_kv_jax.method.accounting import cache_bytes
    from lowrank_kv_jax.methods.parse import parse_method
    from lowrank_kv_jax.storage.sharding import make_mesh

    method = parse_method(args.method)
    Sampler(args.temperature, args.top_k, args.top_p)  # refuse bad values before the model is loaded
    check_numbers(args, prefill_chunk=1)
    texts = read_prompts(args)
    mesh = None if args.mesh is None else make_mesh(args.mesh)
    model = load_from(args, mesh)
    check_new_tokens(args.max_new_tokens, model.config.context)
    ids, longest = encode_texts(model, texts, args.chat), model.config.context - args.max_new_tokens
    check_lengths(ids, longest, args.max_new_tokens, model.config.context)
    bases = bases_from(args, model, method)
    width = -(-max(map(len, ids)) // PAD_TO) * PAD_TO  # no turn follows: the cache has room for the answer only
    capacity = min(width + args.max_new_tokens, model.config.context)
    stream = _Stream(model.tokenizer, model.config.eos_ids, silent=len(texts) > 1)
    out = generate(
        model, method, ids, bases=bases, max_new_tokens=args.max_new_tokens, temperature=args.temperature,
        top_k=args.top_k, top_p=args.top_p, seeds=args.seed, capacity=capacity, dtype=args.cache_dtype, mesh=mesh,
        prefill_chunk=args.prefill_chunk, by_layers=args.by_layers, on_tokens=stream,
    )
    stream.end()
    for number, text in enumerate((out.texts or []) if len(texts) > 1 else [], start=1):
        print(f"--- {number}\n{text}")
    size = cache_bytes(out.cache, bases)
    shared = f" ({size.smaller_apart:.2f}x without the bases, which all requests share)" if size.shared else ""
    host = f" ({size.on_host / 2**20:.2f} MiB of it on the host)" if size.on_host else ""
    print(f"[{args.method}: cache of {size.tokens} tokens {size.total / 2**20:.2f} MiB{host}, full 16-bit cache "
          f"{size.full / 2**20:.2f} MiB, {size.smaller:.2f}x smaller{shared}; {stream.speed()}]", file=sys.stderr)
    return 0


class _Stream:
    """Prints the first row's tokens as they come, unless it is silent, and keeps the time."""

    def __init__(self, tokenizer, eos_ids, silent: bool = False):
        self._tokenizer, self._eos, self._silent = tokenizer, eos_ids, silent
        self._ids: list[int] = []
        self._shown = 0
        self._marks: list[tuple[float, int]] = []
        self._begin = time.perf_counter()

    def __call__(self, block) -> None:
        new = [int(token) for token in block[0] if token >= 0]
        self._marks.append((time.perf_counter(), len(new)))
        self._ids += [token for token in new if token not in self._eos]
        text = self._tokenizer.decode(self._ids)
        if not text.endswith("\ufffd"):  # half of a character: wait for the rest
            self._print(text)

    def _print(self, text: str) -> None:
        if not self._silent:
            print(text[self._shown :], end="", flush=True)
        self._shown = len(text)

    def end(self) -> None:
        self._print(self._tokenizer.decode(self._ids) + "\n")

    def speed(self) -> str:
        """Tokens a second after the first block of steps, whose time is mostly compilation."""
        first = f"first token after {self._marks[0][0] - self._begin:.1f} s"
        if len(self._marks) < 2:
            return first
        skipped = 2 if len(self._marks) > 2 else 1
        tokens = sum(count for _, count in self._marks[skipped:])
        seconds = self._marks[-1][0] - self._marks[skipped - 1][0]
        note = "" if skipped == 2 else ", compilation included"
        return f"{first}, then {tokens / seconds:.1f} tokens/s{note}"
