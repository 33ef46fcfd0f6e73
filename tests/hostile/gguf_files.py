"""GGUF files written field by field, so that each can be wrong; the library's own writer refuses to."""

import struct

import numpy as np
from goldens.tiny_models import CONFIGS, random_tensor

from lowrank_kv_jax import models
from lowrank_kv_jax.models.parameters import stored_arrays

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY, INT, FLOAT, FLAG = 8, 9, 4, 6, 7
CONFIG = CONFIGS["llama2"] | {"num_hidden_layers": 1}


def text(value):
    data = value.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def field(name, kind, value):
    """A key with a value of a kind; of an array, the kind of its items and a list of them. Bytes are taken as they are."""
    return text(name) + struct.pack("<I", kind) + packed(kind, value)


def packed(kind, value):
    if isinstance(value, bytes):
        return value
    if kind == STRING:
        return text(value)
    if kind == ARRAY:
        item, items = value
        return struct.pack("<IQ", item, len(items)) + b"".join(packed(item, one) for one in items)
    return struct.pack(f"<{SCALARS[kind]}", value)


def gguf(fields=(), tensors=(), data=bytes(96), version=3):
    """A file of packed fields, and of tensors (name, shape as GGUF has it, element type, offset)."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields)) + b"".join(fields)
    for name, shape, kind, offset in tensors:
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    return head + bytes(-len(head) % 32) + data


def tiny_fields():
    """Of a whole tiny model: name, kind and value of each."""
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(64)), "▁", *map(chr, range(97, 123)), "ab", "▁a"]
    count = len(vocabulary)
    assert count == CONFIG["vocab_size"]
    return [
        ("general.architecture", STRING, "llama"), ("llama.context_length", INT, 128), ("llama.embedding_length", INT, 48),
        ("llama.feed_forward_length", INT, 80), ("llama.block_count", INT, 1), ("llama.attention.head_count", INT, 4),
        ("llama.attention.head_count_kv", INT, 2), ("llama.attention.layer_norm_rms_epsilon", FLOAT, 1e-5),
        ("llama.rope.freq_base", FLOAT, 10000.0), ("llama.vocab_size", INT, count),
        ("tokenizer.ggml.model", STRING, "llama"), ("tokenizer.ggml.tokens", ARRAY, (STRING, vocabulary)),
        ("tokenizer.ggml.scores", ARRAY, (FLOAT, [-float(i) for i in range(count)])),
        ("tokenizer.ggml.token_type", ARRAY, (5, [3, 3, 3, *[6] * 64, *[1] * (count - 67)])),
        ("tokenizer.ggml.bos_token_id", INT, 1), ("tokenizer.ggml.eos_token_id", INT, 2),
        ("tokenizer.ggml.unknown_token_id", INT, 0), ("tokenizer.ggml.add_bos_token", FLAG, True),
        ("tokenizer.chat_template", STRING, "{{ messages[0].content }}"),
    ]


def tiny_tensors():
    """Of the same model: the entries of the directory, and the bytes behind it."""
    entries, data = [], b""
    for info in stored_arrays(models.read_config(CONFIG)):
        values = random_tensor(info.hf, info.stored_shape)
        entries.append((info.gguf, info.stored_shape[::-1], 0, len(data)))
        data += values.astype(np.float32).tobytes()
        data += bytes(-len(data) % 32)
    return entries, data
