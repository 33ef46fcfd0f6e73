"""The model that lm-eval talks to: `lm_eval --model lowrank-kv --model_args "method=ojakv:rank=0.5;rope=pre"`."""

import math
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from lowrank_kv_jax.calibration.corpus import load_corpus
from lowrank_kv_jax.evals.asking.ask import Asker
from lowrank_kv_jax.evals.asking.batches import Batch, coarse
from lowrank_kv_jax.evals.asking.methods import bases_of
from lowrank_kv_jax.evals.asking.prompts import Question
from lowrank_kv_jax.evals.lm_harness.scoring import Scored, make_pair, score_pairs
from lowrank_kv_jax.evals.results.records import warn
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.models.load import load_model
from lowrank_kv_jax.progress import ProgressBar
from lowrank_kv_jax.saving.saved_bases import load_bases

MAX_NEW_TOKENS = 256  # where a task does not say; lm-eval's own default


@register_model("lowrank-kv")
class LowRankKV(TemplateLM):
    """A model whose contexts are compressed before anything is scored or generated.

    All of a context but its last token is prefilled exactly and compressed; that token, the continuation and what is
    generated run through the compressed cache.
    """

    def __init__(
        self, model: Any = "smollm2-135m", method: str = "full", bases: Any = None,
        calibrate: str | None = None, cache_dtype: str | None = None, dtype: str | None = None,
        batch_size: int | str = 8, max_length: int | None = None, mesh: Any = None, progress: bool = True,
        max_batch_size: Any = None, device: Any = None, prefill_chunk: int | str | None = None,
    ):
        """Load a model and the bases of its method.

        Args:
            model: a name, directory, hub id or .gguf file, or a `LoadedModel`.
            method: a spec. Commas separate lm-eval's own arguments: between the fields of a spec, semicolons stand
                for them.
            bases: of the method, or the folder where they were saved; without it those of a calibrated method are
                fitted now.
            calibrate: text to fit them to, by default the first half of Python's language reference.
            cache_dtype, dtype: of the caches and of the weights; None: the library's defaults.
            batch_size: contexts that share a batch.
            max_length: tokens, at most the model's context.
            mesh: see `forward.prefill`.
            max_batch_size, device: of lm-eval's command line; only batch sizes in numbers and JAX's own device are
                known here.
            prefill_chunk: `chunk` of `prefill`.

        Raises:
            ValueError, OSError: as `load_model`, `parse_method`, `load_bases`.
        """
        super().__init__()
        del max_batch_size, device
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ValueError(f"batch_size={batch_size}: must be a number of contexts, at least 1")
        if prefill_chunk is not None and (not str(prefill_chunk).isdecimal() or int(prefill_chunk) < 1):
            raise ValueError(f"prefill_chunk={prefill_chunk}: must be a number of tokens, at least 1")
        self.prefill_chunk = None if prefill_chunk is None else int(prefill_chunk)
        self.method = parse_method(method.replace(";", ","))
        self.loaded = load_model(model, dtype) if isinstance(model, str) else model
        if self.loaded.tokenizer is None:
            raise ValueError(f"model {self.loaded.name!r} has no tokenizer: lm-eval needs one")
        context = self.loaded.config.context
        if max_length is not None and not 2 <= max_length <= context:
            raise ValueError(f"max_length={max_length}: must lie in 2..{context}")
        self.method.validate(self.loaded.config.attention)
        self.tokenizer, self.max_length = self.loaded.tokenizer, max_length or context
        self.rows, self.mesh, self.cache_dtype, self.progress = int(batch_size), mesh, cache_dtype, progress
        self.bases = self._bases(bases, calibrate, progress)
        self.asker = Asker(self.loaded, {"": self.bases}, cache_dtype, mesh, self.prefill_chunk)
        self.scored: dict[tuple[str, str], Scored] = {}
        """By (context, continuation)."""
        self.warm: set[tuple[int, int]] = set()

    def _bases(self, given: Any, calibrate: str | None, progress: bool) -> Any:
        if isinstance(given, str):
            return load_bases(given, self.loaded, self.method)
        if given is not None or not self.method.calibrated:
            return given
        corpus = load_corpus(calibrate or "pydoc:first")
        return bases_of(self.loaded, {"": self.method}, corpus, dtype=self.cache_dtype, progress=progress).get("")

    # ---- tokens ----------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self.loaded.name.replace("/", "__")

    @property
    def batch_size(self) -> int:
        return self.rows

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text, by default with the token that opens a sequence where the tokenizer has it so and the text does
        not begin with it, as lm-eval's `hf` model has it."""
        del kwargs
        opening = getattr(self.tokenizer, "bos_token", None)
        opens = bool(opening) and string.startswith(opening)
        special = not opens if add_special_tokens is None else add_special_tokens
        return list(self.tokenizer(string, add_special_tokens=special, verbose=False).input_ids)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation.

        Raises:
            ValueError: the tokenizer has no chat template.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("this model's tokenizer has no chat template: run without --apply_chat_template")
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    # ---- requests --------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **kwargs: Any) -> list[tuple[float, bool]]:
        """Log-likelihood, and whether greedy decoding would say it, of ((context, continuation), ids, ids)."""
        del kwargs
        pairs = [make_pair(context, continuation, self.max_length) for _, context, continuation in requests]
        with ProgressBar("lm-eval", len(pairs), self.progress and not disable_tqdm) as bar:
            scored = score_pairs(
                self.loaded, self.method, pairs, bases=self.bases, rows=self.rows, dtype=self.cache_dtype,
                mesh=self.mesh, on_scored=bar.advance, warm=self.warm, prefill_chunk=self.prefill_chunk,
            )
        if not all(math.isfinite(one.logprob) for one in scored):  # lm-eval makes scores of them all the same
            warn(f"{self.method.name}: log-likelihoods are not finite; what is scored by them says nothing")
        for (texts, _, _), one in zip(requests, scored, strict=True):
            if texts is not None:
                self.scored[texts] = one
                self.cache_hook.add_partial("loglikelihood", texts, (one.logprob, one.greedy))
        return [(one.logprob, one.greedy) for one in scored]

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, window by window."""
        windows = [
            [make_disjoint_window(window) for window in get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, 1)]
            for request in requests
        ]
        flat = [(None, context, scored) for row in windows for context, scored in row]
        found = iter(self._loglikelihood_tokens(flat, disable_tqdm))
        totals = [sum(next(found)[0] for _ in row) for row in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations up to a stop sequence or the number of tokens that the task allows.

        Raises:
            ValueError: a task that samples, or leaves no room for its context.
        """
        wanted = [self._stopping(request.args[1]) for request in requests]
        alike: dict[int, list[int]] = {}  # by the tokens that they leave room for: these decide what a context loses
        for i in sorted(range(len(requests)), key=lambda i: len(requests[i].args[0])):
            alike.setdefault(wanted[i][1], []).append(i)
        texts: list[str] = [""] * len(requests)
        with ProgressBar("lm-eval", len(requests), self.progress and not disable_tqdm) as bar:
            for room, own in alike.items():
                for begin in range(0, len(own), self.rows):
                    batch = own[begin : begin + self.rows]
                    found = self._generate([requests[i].args[0] for i in batch], [wanted[i][0] for i in batch], room)
                    for i, text in zip(batch, found, strict=True):
                        texts[i] = text
                        self.cache_hook.add_partial("generate_until", requests[i].args, text)
                    bar.advance(len(batch))
        return texts

    def _generate(self, texts: list[str], until: list[list[str]], room: int) -> list[str]:
        if room + 2 > self.max_length:
            raise ValueError(f"max_gen_toks={room}: leaves no room for a context in {self.max_length} tokens")
        contexts = [self._context(text, self.max_length - room) for text in texts]
        contexts += [contexts[-1]] * (self.rows - len(contexts))
        asked = [((_question(index, stops, room), contexts[index][-1:]),) for index, stops in enumerate(until)]
        asked += [()] * (self.rows - len(asked))
        width = min(coarse(max(map(len, contexts))), self.max_length - room)
        batch = Batch(width, width + room, tuple(context[:-1] for context in contexts), tuple(asked))
        replies = sorted(self.asker.ask(batch, {"": self.method}), key=lambda reply: reply.question.index)
        return [postprocess_generated_text(reply.text, stops, None) for reply, stops in zip(replies, until, strict=True)]

    def _context(self, text: str, longest: int) -> tuple[int, ...]:
        """Ids of a context, at least two: one to compress, and one to go on from."""
        ids = self.tok_encode(text)
        return tuple(([self.prefix_token_id] * (2 - len(ids)) + ids)[-longest:])

    def _stopping(self, kwargs: dict) -> tuple[list[str], int]:
        """Stop sequences and the most tokens of a request."""
        settings = normalize_gen_kwargs(kwargs, MAX_NEW_TOKENS)
        if settings.get("do_sample") or settings.get("temperature"):
            raise ValueError("do_sample: answers are greedy here; give temperature=0 or do_sample=false")
        eos = self.tokenizer.decode([self.eot_token_id])
        return handle_stop_sequences(settings.get("until"), eos=eos), settings["max_gen_toks"]


def _question(index: int, until: list[str], most: int) -> Question:
    """What ends a greedy continuation; lm-eval scores it itself."""
    def stopped(text: str) -> bool:
        return any(stop in text for stop in until)

    return Question("", 0, index, "", "", "", most, score=lambda text: 0.0, complete=stopped, special=True)
