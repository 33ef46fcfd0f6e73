"""Strings on which the rebuilt tokenizers must agree with transformers; a small SentencePiece vocabulary."""

TEXTS = [
    "",
    " ",
    "Hello world",
    "  leading and   inner    spaces  ",
    "\ttabs\t\tand\nnewlines\n\n\nthree\r\nwindows\r\n",
    "In 1999, 1234567890 people paid $3.14159 (or 2,718,281.8%) on 2024-02-29 at 12:34:56.",
    "x1y22z333 007 0x1F 1e-10 v2.0.1 ١٢٣ ⅷ ½ 10²",
    "don't can't I'll we've they're I'd it's 'quoted' \"double\" DON'T",
    "Straße, naïve café, Ærøskøbing, Łódź, İstanbul, ÅNGSTRÖM, e\u0301 (decomposed)",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם. مرحبا بالعالم. नमस्ते दुनिया",
    "你好，世界。今天是二〇二四年。こんにちは世界、カタカナ。안녕하세요 세계",
    "😀🎉👩‍👩‍👧‍👦🇫🇷 🤷🏽‍♀️ ✓ → ∞ ≠ ∑ ½ ™ \u200b zero-width \ufeff bom",
    'def f(x: int, *args, **kw) -> str:\n    """Doc."""\n    return f"{x!r:>10}"  # comment\n\n'
    "\tif x >= 10 and y != 2:\n",
    '#include <stdio.h>\nint main(void){for(int i=0;i<10;++i)printf("%d\\n",i);return 0;}',
    '<div class="a">&amp; &lt;tag/&gt;</div> https://example.org/path?q=1&r=%20#frag a.b@c.de',
    'SELECT * FROM t WHERE id = 42; -- drop\n{"key": [1, 2.5, null, true]}',
    "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>a<|im_end|> b <|im_start|><|im_start|> <|im_ start|>"
    " <repo_name>x<file_sep>y <jupyter_code>",
    "a" * 50 + "!" * 20 + "-" * 33 + "=" * 8 + " " * 17 + "." * 5,
    "The special magic number for wandering-otter is: 8231947.",
    "ﬁ ﬂ Ⅳ ① ㎏ \u00a0nbsp\u2003em \u3000ideographic",
    "\x00\x01\x7f control \x1b[0m",
    "CamelCaseWord snake_case_word kebab-case-word SCREAMING_CASE mixed123abc456",
]


_MERGED = (
    "▁t",
    "he",
    "▁the",
    "▁a",
    "in",
    "er",
    "an",
    "re",
    "on",
    "or",
    "▁w",
    "▁wor",
    "ld",
    "▁world",
    "ll",
    "el",
    "ell",
    "▁s",
    "▁i",
    "▁is",
    "en",
    "▁▁",
    "ing",
    "mb",
    "umb",
    "▁n",
    "▁numb",
    "▁number",
    "19",
    "99",
    "1999",
    "it",
)


def sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and GGUF token types, in the order of a SentencePiece BPE model."""
    single = [chr(code) for code in range(33, 127)] + ["▁", "é", "ß", "П", "р", "世"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_MERGED, *single]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(_MERGED) + len(single))]
    return tokens, scores, [2, 3, 3] + [6] * 256 + [1] * (len(_MERGED) + len(single))
