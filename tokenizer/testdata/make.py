#!/usr/bin/env python3
"""Makes what the tests of this package compare with, by asking the libraries it must agree with.

    pip install tokenizers==0.23.3 sentencepiece==0.2.2
    python3 make.py            # writes texts.json, want.json.gz, random.json.gz, ../unicode.txt
    python3 make.py --check    # writes nothing; exit status 1 if a committed file would change
    python3 make.py --train    # also trains the small tokenizers anew, on the Go tree's sources
    python3 make.py --random N -o FILE.json.gz      # a longer random.json.gz, for go test -random
    python3 make.py --bench 5000000                 # single-thread speed of the library, MB/s

The tokenizers are small, but each has exactly the normalizer, pre-tokenizer, post-processor, decoder
and added-token flags of the family it is named after.
"""

import argparse
import gzip
import io
import json
import os
import random
import struct
import subprocess
import sys
import time
import unicodedata
import zlib

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAYON_NUM_THREADS", "1")

import sentencepiece as spm  # noqa: E402
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))

# The patterns, as the published files spell them.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
CL100K = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
          r"|\s*[\r\n]|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN35 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
          r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTION}"
         rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTION}|\p{{N}}{{1,3}}|{TAIL}")
TEKKEN = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+"
          rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}|{TAIL}")
DEEPSEEK = ["\\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
            "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?"
            "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"]
PATTERNS = {"gpt2": GPT2, "llama3": LLAMA3, "cl100k": CL100K, "qwen2": QWEN2, "qwen35": QWEN35,
            "o200k": O200K, "tekken": TEKKEN, "deepseek0": DEEPSEEK[0], "deepseek1": DEEPSEEK[1],
            "deepseek2": DEEPSEEK[2], "digit": r"\p{N}"}
BEHAVIORS = ["Isolated", "Removed", "Contiguous", "MergedWithPrevious", "MergedWithNext"]

# ---------------------------------------------------------------------------- texts

TEXTS = [
    "", " ", "  ", "   ", "\n", "\r\n", "\t", "a", " a", "a ", " a ", "  a  b  ", "\u00a0", "\u3000 x",
    "Hello, world!", "hello world", "Hello  world\n\n  next line", "The quick brown fox jumps over the lazy dog.",
    "I'm you're he's we'll they'd I've can't", "I'M YOU'RE HE'S WE'LL THEY'D I'VE CAN'T", "it'S It's IT's 'tis 'S' 'ſ 'ſx",
    "don't'll've''s '' 'd'", "x'sy x'rey x'res 'r 'l 'v 're're", "e\u0301's o\u0308'LL",
    "0 1 12 123 1234 12345 123456 1234567", "3.14159 1,000,000 0x1F 1e-9 v2.0.1", "٣٤٥ १२३ ௧௨௩ ⅷ ½ ² ①②③ 𝟘𝟙𝟚 一二三",
    "foo_bar fooBar FooBar FOOBar fooBAR HTTPServer iPhone McDonald's XMLHttpRequest",
    "func main() {\n\tfmt.Println(\"hi\")\n}\n", "\t\tif x != nil {\r\n\t\t\treturn err\r\n\t\t}\r\n",
    "for i := 0; i < 10; i++ {  // count\n", "def f(x):\n    return x**2  # square\n\n\n", "a\n\n\nb\n \n \n c\n\t\n",
    "trailing spaces   ", "   leading spaces", "tabs\tand\t\ttabs \t mix \t", "line\rline\r\rline\n\rline", "a\u0085b\u2028c\u2029d",
    "\u2003em\u2009thin\u200bzero\u202fnarrow\u205fmath\u1680ogham", "non\u00a0breaking\u00a0\u00a0space",
    "café cafe\u0301 naïve nai\u0308ve Å A\u030a Å \u212b", "Z\u0351\u036b\u0343a\u0320\u0300l\u0489g\u0335o\u0321\u0345", "q\u0307\u0323 q\u0323\u0307 \u1e9b\u0323",
    "\u0301start with mark", " \u0301space mark", "a\u0301\u0301\u0301b", "ﬁ ﬂ ﬃ ſt ﬆ Ⅳ ㎏ ™ ℌ ① ﾊﾝｶｸ",
    "你好，世界！今天天气怎么样？", "日本語のテキスト、カタカナとひらがな。", "한국어 텍스트 \u1112\u1161\u11ab\u1100\u1173\u11af", "漢字kanji混在text123テスト",
    "Привет, мир! Как дела?", "Γειά σου Κόσμε ΑΣΑΣ ς", "שלום עולם! מה שלומך?", "مرحبا بالعالم، كيف حالك؟ ١٢٣", "سَلَامٌ عَلَيْكُمْ",
    "नमस्ते दुनिया क्षत्रिय", "สวัสดีชาวโลก", "வணக்கம் உலகம்", "ሰላም ዓለም", "Xin chào thế giới ưỡng", "ǅ ǈ ǋ ǲ ᾈ ᾳ",
    "😀 😃😄 👍🏽 👩‍💻 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇯🇵", "☃️ ❤️ ™️ ©️ 1️⃣ #️⃣", "text😀text 😀text text 😀",
    "\u200dzwj\u200d \u200cznj", "\u200e\u200frtl\u202emarks\u202c", "\ufeffbom \ufffd \ufffe", "\x00\x01\x02\x1b[31mred\x1b[0m\x7f", "\x0b\x0c\x1c\x1d\x1e\x1f x",
    "𝒜𝓁𝑔𝑒𝒷𝓇𝒶 𐍈 𝄞 𠀀𠀁", "\U0010ffff\U000e0001\ue000", "ʰ ˈstrɛs ᵃᵇ ªº", "ªABCº Aªb ÀÉ Éa éA", "aʰB AʰB ʰAB ʰab \u0301AB \u0301Ab",
    "http://example.com/a/b?c=d&e=f#g", "C:\\path\\to\\file.txt ../x/./y //z", "<html><body class=\"x\">&nbsp;</body></html>", "{\"a\": [1, 2.5, -3], \"b\": null}",
    "!!! ??? ... --- *** ### @@@ $$$ %%% ^^^ &&& ~~~", "!hello #tag @user $var ~x \\n `code` [x] (y) {z} 'q' \"r\"", "a-b-c a--b a — b – c … “quotes” ‘single’ «guillemets»",
    "====================================================================", "-" * 200, " " * 300, "\n" * 50, "a" * 300, "ab" * 100, "🙂" * 40,
    " \n \r\n \t\n x", "x \n", "x  \n  y", "x\n  y", "x \n\n y /\n//\r\n", "./\n/\n !\n\n!/\r\n/",
    "<|endoftext|>", "a<|endoftext|>b", " <|endoftext|> ", "<|begin_of_text|>x<|end_of_text|><|eot_id|>", "<|im_start|>user\nhi<|im_end|>\n",
    "<think>\nhm</think>", "<s>x</s>", " <s> x </s> y", "<s><s></s></s>", "<unk> <pad> <bos><eos>", "<start_of_turn>user\nhi<end_of_turn>\n",
    "<|user|>\n  hi <|end|>\n\n<|assistant|>\n x", "x <|user|>   y", "<|us<|user|>er|>", "<|endoftext|", "<mask> x<mask>y <mask>", " word words sword word, wordy word",
    "[LEFT] a  [LEFT] [RIGHT]  b [BOTH]  c [BOTH]", "ＦＵＬＬ ＷＩＤＴＨ [ＮＦ] Norm norm NORM", "▁▁ ▁x x▁y ▁", "a ▁ b", "<0x41> <0xE2> <0x0a>", "\u2581", "  ▁  ",
    "\n\n\n\t\tx", "   \n   ", "a  b   c    d     e      f", "1  2   3", "a\n b\n  c\n   d", "😀\u200d\u200d", "e\u200d\u0301",
    "longword" * 40 + " " + "x" * 17 + " " + "y" * 16 + " " + "z" * 15, "The following are short. It is a test; it's only a test -- of the (emergency) system: OK?",
    "Ünïcödé ŠČŘŽ ß ẞ İı ŉ ŀl ﬀ", "ⒶⒷ ⓐⓑ ㈱ ㊙ 〄 ㌔", "A\u030aB C\u0327\u0301 \u1100\u1161\u11a8 \uac00\u11a8", "각 가\u11a8 \u1100\u1161", "\u0958 \u0915\u093c \u2126 \u212a",
    "<sep>x <sep> y<sep>", "<sep>", "word<sep>word 你<sep>", "the<sep>the the",  # a token right at the start
    "你好 ✂✂ 你✂好 é✂é \U0001f600✂",  # known, unknown and spelled in turn
    "<sep>}}}}}", "<custom>x---", " the-----", ",<custom>-----------------------Ⴖ", "<sep>AAAAAAAAAAAAAAAAAAAAAAA",  # ties of a unigram model
    "ignored ignoredx zzqq zzqq!", "'ignored", "x\ty\tz 'ſS ’s ’S", "9'9 '9 '12", "a１２３b 12３4", "\u0345\u0345 \u0f71\u0f72\u0f74", "Ǆǅǆ Ⴀა ᲐᏍꮝ",
]

ATOMS = [
    " ", " ", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\r", "\t", "\u00a0", "\u3000", "\u2028", "\x0b", "\x1c", "\x85",
    "'s", "'S", "'t", "'re", "'RE", "'Ve", "'m", "'LL", "'ll", "'d", "'", "''", "'ſ", "’s", "'x",
    "a", "b", "e", "A", "Z", "the", "The", "THE", "ing", "er", "func", "return", "err", "nil", "int", "string", "camelCase", "HTTPServer", "foo_bar", "x1y2",
    "0", "1", "12", "123", "1234", "٣", "½", "²", "𝟘", "Ⅷ", "一", "１",
    ".", ",", "!", "?", "/", "//", "\\", "-", "--", "_", "(", ")", "[", "]", "{", "}", "\"", "#", "$", "+", "=", "<", ">", "|", "`", "~", "…", "“", "€", "±",
    "é", "e\u0301", "\u0301", "\u0323", "\u0307", "\u0345", "\u0300\u0301", "\u200d", "\u200b", "\ufe0f", "\u0489", "Å", "\u212b", "ﬁ", "ǅ", "ʰ", "ª", "ß", "İ", "ſ",
    "你", "好世界", "日本", "カタ", "ひら", "한국", "\u1112\u1161\u11ab", "\u11a8", "Привет", "мир", "Σς", "שלום", "مرحبا", "سَ", "नमस्ते", "\u093f", "สวัสดี", "ก\u0e33",
    "😀", "👍🏽", "👩‍💻", "🇩🇪", "☃️", "𝒜", "𠀀", "▁", "▁▁", "<0x0A>", "\x00", "\x7f", "\ufffd", "\ufeff", "\U0010ffff",
    "<|endoftext|>", "<|begin_of_text|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<s>", "</s>", "<unk>", "<bos>", "<start_of_turn>",
    "<|user|>", "<|end|>", "<mask>", "word", "[LEFT]", "[RIGHT]", "[BOTH]", "[NF]", "Norm", "<sep>", "<custom>", "<tab>", "zzqq", "ignored",
]


def random_texts(n):
    r = random.Random(n)
    assigned = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF and unicodedata.category(chr(c)) not in ("Cn", "Co")]
    low = [c for c in assigned if c < 0x3000]
    out = []
    for i in range(n):
        parts = []
        for _ in range(r.choice((1, 2, 3, 5, 8, 12))):
            k = r.random()
            if k < 0.80:
                parts.append(r.choice(ATOMS))
            elif k < 0.90:
                parts.append(chr(r.choice(low)))
            elif k < 0.93:
                parts.append(chr(r.choice(assigned)))
            elif k < 0.97:
                parts.append("".join(r.choice("abcdefghijklmnop XYZ'") for _ in range(r.randint(1, 9))))
            else:
                parts.append(r.choice(ATOMS) * r.randint(2, 24))
        out.append("".join(parts))
    return out


# ---------------------------------------------------------------------------- tokenizers

def added(content, id, special=True, **flags):
    t = {"id": id, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    t.update(flags)
    return t


def split(pattern, behavior="Isolated", kind="Regex"):
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": False}


def byte_level(prefix=False, trim=True, regex=False):
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": trim, "use_regex": regex}


def sequence(key, *parts):
    return {"type": "Sequence", key: list(parts)}


def template(first, id, last=None, last_id=None):
    single = [{"SpecialToken": {"id": first, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {first: {"id": first, "ids": [id], "tokens": [first]}}
    if last:
        single.append({"SpecialToken": {"id": last, "type_id": 0}})
        special[last] = {"id": last, "ids": [last_id], "tokens": [last]}
    pair = single + [{"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def replace(a, b):
    return {"type": "Replace", "pattern": {"String": a}, "content": b}


def corpus():
    root = subprocess.run(["go", "env", "GOROOT"], capture_output=True, text=True, check=True).stdout.strip()
    texts = []
    for pkg in ("fmt", "strconv", "errors", "sort", "bufio"):
        for name in sorted(os.listdir(os.path.join(root, "src", pkg))):
            if name.endswith(".go") and not name.endswith("_test.go"):
                with open(os.path.join(root, "src", pkg, name), encoding="utf-8") as f:
                    texts.append(f.read())
    return texts + TEXTS * 30


def file(model, **parts):
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
             "pre_tokenizer": None, "post_processor": None, "decoder": None}
    whole.update(parts)
    whole["model"] = model
    return whole


def bpe(vocab, merges, **options):
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
             "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    model.update(options)
    model["vocab"], model["merges"] = vocab, merges
    return model


def train_bytes(pre, size=640, normalizer=None, special=()):
    t = Tokenizer.from_str(json.dumps(file(bpe({}, []), pre_tokenizer=pre, normalizer=normalizer)))
    t.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False))
    m = json.loads(t.to_str())["model"]
    return m["vocab"], m["merges"]


def train_byte_families():
    out = {}
    pre = byte_level(regex=True)
    vocab, merges = train_bytes(pre)
    n = len(vocab)
    vocab["<|endoftext|>"] = n
    out["gpt2"] = file(
        bpe(vocab, [" ".join(m) for m in merges], continuing_subword_prefix="", end_of_word_suffix=""),
        added_tokens=[added("<|endoftext|>", n, normalized=True)], pre_tokenizer=pre, post_processor=byte_level(True, False, True), decoder=byte_level(True, True, True))
    del out["gpt2"]["model"]["type"], out["gpt2"]["model"]["ignore_merges"]  # as the file on the hub

    pre = sequence("pretokenizers", split(LLAMA3), byte_level())
    vocab, merges = train_bytes(pre)
    for extra in ("Ġignored", "zzqq", "Ġzzqq", "'ign"):
        vocab[extra] = len(vocab)
    n = len(vocab)
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|reserved_special_token_0|>"]
    out["llama3"] = file(
        bpe(vocab, merges, ignore_merges=True), added_tokens=[added(s, n + i) for i, s in enumerate(names)], pre_tokenizer=pre,
        post_processor=sequence("processors", byte_level(True, False, True), template(names[0], n)), decoder=byte_level(True, True, True))

    pre = sequence("pretokenizers", split(QWEN2), byte_level(trim=False))
    nfc = {"type": "NFC"}
    vocab, merges = train_bytes(pre, normalizer=nfc)
    n = len(vocab)
    names = [("<|endoftext|>", True), ("<|im_start|>", True), ("<|im_end|>", True), ("<tool_call>", False), ("<think>", False), ("</think>", False)]
    out["qwen2"] = file(
        bpe(vocab, [" ".join(m) for m in merges], continuing_subword_prefix="", end_of_word_suffix=""),
        added_tokens=[added(s, n + i, special) for i, (s, special) in enumerate(names)], normalizer=nfc, pre_tokenizer=pre,
        post_processor=byte_level(trim=False), decoder=byte_level(trim=False))

    pre = sequence("pretokenizers", split(TEKKEN), byte_level())
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    vocab, merges = train_bytes(pre, special=names)
    out["nemo"] = file(
        bpe(vocab, merges, ignore_merges=True), added_tokens=[added(s, i) for i, s in enumerate(names)], pre_tokenizer=pre,
        post_processor=template("<s>", 1, "</s>", 2), decoder=byte_level(True, True, True))

    pre = sequence("pretokenizers", *[split(p) for p in DEEPSEEK], byte_level())
    vocab, merges = train_bytes(pre)
    n = len(vocab)
    names = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]
    out["deepseek"] = file(
        bpe(vocab, merges), added_tokens=[added(s, n + i) for i, s in enumerate(names)] + [added("<think>", n + 2, False)],
        normalizer=sequence("normalizers"), pre_tokenizer=pre, post_processor=template(names[0], n), decoder=byte_level(True, True, True))

    # Not a family: every flag of an added token, and the pre-tokenizers that the others do not use.
    pre = sequence("pretokenizers", {"type": "Punctuation", "behavior": "Isolated"}, {"type": "Digits", "individual_digits": True},
                   split("q", "MergedWithPrevious", "String"), byte_level(True, True, True))
    nf = sequence("normalizers", {"type": "NFKC"}, replace("Norm", "norm"))
    vocab, merges = train_bytes(pre, 420, nf)
    merges = [m for m in merges if "word" not in "".join(m)]
    vocab = {s: i for i, s in enumerate(s for s in vocab if "word" not in s)}
    n = len(vocab)
    out["flags"] = file(bpe(vocab, merges), added_tokens=[
        added("<mask>", n, lstrip=True), added("word", n + 1, False, single_word=True), added("[LEFT]", n + 2, False, lstrip=True),
        added("[RIGHT]", n + 3, False, rstrip=True), added("[BOTH]", n + 4, lstrip=True, rstrip=True, single_word=True),
        added("[ＮＦ]", n + 5, False, normalized=True), added("NORM", n + 6, False, normalized=True), added("Norm", n + 7, False, normalized=True, single_word=True),
        added("<|endoftext|>", n + 8), added("<|end", n + 9, False)], normalizer=nf, pre_tokenizer=pre, decoder=byte_level(True, True, True))
    return out


def train_piece_models():
    os.chdir(HERE)  # the names of these two end up in the models
    path, rules = ".corpus.txt", ".rules.tsv"
    with open(path, "w", encoding="utf-8") as f:
        f.write("\n".join(line[:2000] for t in corpus() for line in t.split("\n") if line.strip() and "\0" not in line))
    with open(rules, "w", encoding="utf-8") as f:
        for a, b in (("ﬁ", "fi"), ("\u3000", " "), ("\u00a0", " "), ("\t", " "), ("e\u0301", "é"), ("１", "1"), ("A", "a"), ("AB", "ab+"), ("\u200b", ""), ("½", "1/2")):
            f.write(" ".join("%X" % ord(c) for c in a) + "\t" + " ".join("%X" % ord(c) for c in b) + "\n")
    common = dict(input=path, num_threads=1, shuffle_input_sentence=False, minloglevel=2, max_sentence_length=20000, character_coverage=0.985)
    kinds = {
        # The options of Llama 2's model, with a vocabulary of 800.
        "spm_bpe": dict(model_type="bpe", vocab_size=800, byte_fallback=True, normalization_rule_name="identity", split_digits=True,
                        remove_extra_whitespaces=False, add_dummy_prefix=True, allow_whitespace_only_pieces=True, pad_id=-1),
        # Gemma's: no dummy prefix, symbols of its own, pad and eos before bos.
        "spm_gemma": dict(model_type="bpe", vocab_size=900, byte_fallback=True, normalization_rule_name="identity", split_digits=True,
                          remove_extra_whitespaces=False, add_dummy_prefix=False, allow_whitespace_only_pieces=True, pad_id=0, eos_id=1, bos_id=2, unk_id=3, eos_piece="<eos>", bos_piece="<bos>",
                          user_defined_symbols=["<start_of_turn>", "<end_of_turn>", "\n\n", "\n", "▁▁", "▁▁▁", "<tab>", "<tabs>"]),
        # T5's options: unigram, whitespace folded, a character map (a small one, the real one has 240 KB), no bytes.
        "spm_unigram": dict(model_type="unigram", vocab_size=700, normalization_rule_tsv=rules, user_defined_symbols=["<sep>", "<custom>", "▁the"], control_symbols=["<ctl>"],
                            unk_surface=" ?? ", bos_id=-1, eos_id=1, unk_id=2, pad_id=0),
        "spm_unigram_bytes": dict(model_type="unigram", vocab_size=800, byte_fallback=True, normalization_rule_name="identity", split_digits=True,
                                  remove_extra_whitespaces=False, treat_whitespace_as_suffix=True),
    }
    out = {}
    for name, options in kinds.items():
        buf = io.BytesIO()
        spm.SentencePieceTrainer.train(model_writer=buf, **{k: v for k, v in common.items()}, **options)
        out[name] = buf.getvalue()
    os.remove(path)
    os.remove(rules)
    return out


def pieces_to_bpe(model, names=()):
    """The vocabulary and merges that transformers makes of a SentencePiece BPE model."""
    p = spm.SentencePieceProcessor(model_proto=model)
    vocab = {p.id_to_piece(i): i for i in range(p.get_piece_size())}
    merges = []
    for piece, i in vocab.items():
        if p.is_byte(i) or p.is_control(i) or p.is_unknown(i):
            continue
        for k in range(1, len(piece)):
            if piece[:k] in vocab and piece[k:] in vocab:
                merges.append((i, piece[:k], piece[k:]))
    merges.sort(key=lambda m: (m[0], vocab[m[1]], vocab[m[2]]))
    return vocab, [[a, b] for _, a, b in merges]


def train_piece_families(spms):
    out = {}
    vocab, merges = pieces_to_bpe(spms["spm_bpe"])
    model = bpe(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    three = [added("<unk>", 0), added("<s>", 1), added("</s>", 2)]
    decoder = sequence("decoders", replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0})
    prepend = sequence("normalizers", {"type": "Prepend", "prepend": "▁"}, replace(" ", "▁"))
    out["llama2"] = file(model, added_tokens=three, normalizer=prepend, post_processor=template("<s>", 1), decoder=decoder)
    out["mistral"] = file(model, added_tokens=three + [added("[INST]", len(vocab))],
                          pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
                          post_processor=template("<s>", 1), decoder=decoder)
    n = len(vocab)
    names = ["<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"]
    out["phi3"] = file(model, added_tokens=[added("<unk>", 0), added("<s>", 1), added("</s>", 2, False, rstrip=True)]
                       + [added(s, n + i, rstrip=i > 0) for i, s in enumerate(names)],
                       normalizer=prepend, post_processor=template("<s>", 1), decoder=decoder)

    vocab, merges = pieces_to_bpe(spms["spm_gemma"])
    ids = [i for s, i in vocab.items() if s in ("\n\n", "\n", "▁▁", "▁▁▁", "<start_of_turn>", "<end_of_turn>")]
    by_id = {i: s for s, i in vocab.items()}
    out["gemma"] = file(
        bpe(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True),
        added_tokens=[added(s, i) for i, s in enumerate(["<pad>", "<eos>", "<bos>", "<unk>"])]
        + [added(by_id[i], i, by_id[i].startswith("<")) for i in sorted(ids)],
        normalizer=replace(" ", "▁"), pre_tokenizer=split(" ", "MergedWithPrevious", "String"), post_processor=template("<bos>", 2),
        decoder=sequence("decoders", replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}))

    # Not a family: no byte fallback, unknowns fused or not, Metaspace that splits.
    vocab = {s: i for i, s in enumerate(s for s in pieces_to_bpe(spms["spm_bpe"])[0] if not s.startswith("<0x"))}
    merges = [m for m in pieces_to_bpe(spms["spm_bpe"])[1]]
    meta = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    out["metaspace"] = file(bpe(vocab, merges, unk_token="<unk>", fuse_unk=False), added_tokens=three, pre_tokenizer=meta, decoder=meta)
    # Nor is this: only some bytes, unknowns fused, and added tokens of the normalized text before a blank that is put first.
    vocab = {s: i for i, s in enumerate(s for s in pieces_to_bpe(spms["spm_bpe"])[0] if not s.startswith("<0xF") and not s.startswith("<0xC"))}
    n = len(vocab)
    out["fused"] = file(
        bpe(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True),
        added_tokens=three + [added("<sep>", n, normalized=True), added("word", vocab.get("word", n + 1), False, normalized=True, single_word=True)],
        normalizer=sequence("normalizers", {"type": "NFD"}, replace("ﬁ", "fi")),
        pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True},
        decoder={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": True})
    return out


def train():
    spms = train_piece_models()
    for name, data in spms.items():
        with open(os.path.join(HERE, name + ".model"), "wb") as f:
            f.write(data)
    for name, whole in (train_byte_families() | train_piece_families(spms)).items():
        with open(os.path.join(HERE, name + ".json"), "w", encoding="utf-8") as f:
            f.write(json.dumps(whole, ensure_ascii=False, separators=(",", ":")) + "\n")


# ---------------------------------------------------------------------------- expectations

# The last is what Train makes in train_test.go; go test -update writes it.
JSONS = ["gpt2", "llama3", "qwen2", "nemo", "deepseek", "flags", "llama2", "mistral", "phi3", "gemma", "metaspace", "fused", "trained"]
MODELS = ["spm_bpe", "spm_gemma", "spm_unigram", "spm_unigram_bytes"]


class JSONFile:
    def __init__(self, name):
        self.t = Tokenizer.from_file(os.path.join(HERE, name + ".json"))
        self.literal = Tokenizer.from_file(os.path.join(HERE, name + ".json"))
        self.literal.encode_special_tokens = True
        self.size = self.t.get_vocab_size()

    def encode(self, text):
        return self.t.encode(text).ids

    def decode(self, ids, skip=True):
        return self.t.decode(ids, skip_special_tokens=skip)

    def all(self, text):
        ids = self.encode(text)
        return {"ids": ids, "bare": self.t.encode(text, add_special_tokens=False).ids,
                "literal": self.literal.encode(text, add_special_tokens=False).ids, "text": self.decode(ids), "whole": self.decode(ids, False)}


class PieceFile:
    def __init__(self, name):
        self.t = spm.SentencePieceProcessor(model_file=os.path.join(HERE, name + ".model"))
        self.size = self.t.get_piece_size()

    def encode(self, text):
        return self.t.encode(text)

    def decode(self, ids):
        return self.t.decode(ids)

    def all(self, text):
        ids = self.encode(text)
        return {"ids": ids, "bare": ids, "literal": ids, "text": self.decode(ids)}


def oracles():
    return {n: JSONFile(n) for n in JSONS} | {n: PieceFile(n) for n in MODELS}


def id_texts(t, size):
    """Every id by itself, and runs that no text gives: bytes out of order, unknowns, specials in the middle."""
    r = random.Random(7)
    runs = [[i] for i in range(0, size, 7)] + [[r.randrange(size) for _ in range(r.randint(2, 9))] for _ in range(150)]
    return [[ids, t.decode(ids)] for ids in runs]


def trainer():
    """What the library's trainer learns from the texts that Train is tested with."""
    with open(os.path.join(HERE, "..", "..", "LICENSE"), encoding="utf-8") as f:
        texts = TEXTS + [f.read()]
    special = ["<|endoftext|>", "<|pad|>"]
    t = Tokenizer.from_str(json.dumps(file(bpe({}, []), pre_tokenizer=sequence("pretokenizers", split(LLAMA3), byte_level()))))
    t.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=700, min_frequency=2, special_tokens=special, show_progress=False,
                                                     initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    m = json.loads(t.to_str())["model"]
    return {"vocab": m["vocab"], "merges": m["merges"]}


def want():
    families = {}
    for name, t in oracles().items():
        families[name] = {"size": t.size, "texts": [t.all(text) for text in TEXTS], "decode": id_texts(t, t.size)}
        if name in JSONS:  # what special tokens look like when they are kept
            families[name]["keep"] = [t.decode(ids, False) for ids, _ in families[name]["decode"]]
    r = random.Random(8)
    parts = [b"a", b"\xe2\x82\xac", b"\xf0\x9f\x98\x80"] + [bytes([c]) for c in (
        0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc0, 0xc2, 0xdf, 0xe0, 0xe1, 0xed, 0xef, 0xf0, 0xf1, 0xf4, 0xf5, 0xff)]
    broken = [b"".join(r.choice(parts) for _ in range(r.randint(1, 8))) for _ in range(500)]
    return {"families": families, "trainer": trainer(), "broken": [[b.hex(), b.decode(errors="replace")] for b in broken]}


def crc(items):
    """The CRC-32 of each block of ten, so that a difference can be found again."""
    sums = []
    for i in range(0, len(items), 10):
        sums.append(zlib.crc32(b"".join(items[i:i + 10])))
    return sums


def numbers(values):
    return struct.pack("<%di" % (len(values) + 1), *values, -1)


def randoms(n):
    texts = random_texts(n)
    out = {"texts": texts, "ids": {}, "splits": {}, "norms": {}}
    for name, t in oracles().items():
        rows = []
        for text in texts:
            ids = t.encode(text)
            rows.append(numbers(ids) + t.decode(ids).encode() + b"\xff")
        out["ids"][name] = crc(rows)
    for name, pattern in PATTERNS.items():
        for behavior in BEHAVIORS if name in ("llama3", "deepseek2") else BEHAVIORS[:1]:
            for invert in (False, True) if name == "deepseek2" else (False,):
                p = pre_tokenizers.Split(Regex(pattern), {"MergedWithPrevious": "merged_with_previous", "MergedWithNext": "merged_with_next"}.get(
                    behavior, behavior.lower()), invert)
                key = f"{name} {behavior}" + (" invert" if invert else "")
                out["splits"][key] = crc([numbers([len(s.encode()) for s, _ in p.pre_tokenize_str(text)]) for text in texts])
    for name in ("NFC", "NFD", "NFKC", "NFKD"):
        f = getattr(normalizers, name)()
        out["norms"][name] = crc([f.normalize_str(text).encode() + b"\xff" for text in texts])
    return out


# ---------------------------------------------------------------------------- unicode.txt

def ranges(points):
    out, points = [], sorted(points)
    i = 0
    while i < len(points):
        j = i
        while j + 1 < len(points) and points[j + 1] == points[j] + 1:
            j += 1
        out.append("%x" % points[i] if i == j else "%x-%x" % (points[i], points[j]))
        i = j + 1
    return out


def wrap(head, words):
    lines, line = [], head
    for w in words:
        if len(line) + 1 + len(w) > 118:
            lines.append(line)
            line = head
        line += " " + w
    return lines + [line]


def unicode_table():
    """Asks the library for each code point: versions of Unicode differ between its parts and from Go's."""
    chars = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
    every = "".join(map(chr, chars))

    def by_regex(rx):
        found = pre_tokenizers.Split(Regex("[^%s]+" % rx), "removed").pre_tokenize_str(every)
        return {ord(c) for s, _ in found for c in s}

    def by_parts(pre, sep):
        found = pre.pre_tokenize_str("".join(sep + chr(c) for c in chars) + sep)
        return {ord(c) for s, _ in found if sep not in s for c in s}

    lines = ["# Classes of characters and Unicode normal forms as Hugging Face tokenizers 0.23.3 has them;",
             "# testdata/make.py writes this file. A class has code points or ranges in hexadecimal."]
    for name, rx in (("upper", r"\p{Lu}\p{Lt}"), ("lower", r"\p{Ll}"), ("letter", r"\p{Lm}\p{Lo}"), ("mark", r"\p{M}"), ("number", r"\p{N}"),
                     ("punct", r"\p{P}"), ("symbol", r"\p{S}"), ("space", r"\s")):
        lines += wrap(name, ranges(by_regex(rx)))
    lines += wrap("numeric", ranges(by_parts(pre_tokenizers.Digits(True), "a")))
    lines += wrap("punctuation", ranges(by_parts(pre_tokenizers.Punctuation(), "a")))
    lines += wrap("word", ranges(by_parts(pre_tokenizers.Whitespace(), ".")))

    rest = [c for c in chars if c != 10]
    def form(f, strings):
        return f.normalize_str("\n".join(strings)).split("\n")
    nfd = dict(zip(rest, form(normalizers.NFD(), map(chr, rest))))
    nfkd = dict(zip(rest, form(normalizers.NFKD(), map(chr, rest))))
    hangul = range(0xAC00, 0xD7A4)
    code = lambda s: "+".join("%x" % ord(c) for c in s)
    lines += wrap("canonical", ["%x=%s" % (c, code(s)) for c, s in nfd.items() if s != chr(c) and c not in hangul])
    lines += wrap("compatible", ["%x=%s" % (c, code(s)) for c, s in nfkd.items() if s != nfd[c] and c not in hangul])

    # A mark's class decides its order after another; an older version of Unicode may not know the mark.
    marks = [c for c in rest if unicodedata.combining(chr(c))]
    after = form(normalizers.NFD(), (("\u0345" if unicodedata.combining(chr(c)) == 1 else "") + chr(c) + "\u0334" for c in marks))
    groups = {}
    for c, s in zip(marks, after):
        if s[0] != chr(c) or unicodedata.combining(chr(c)) == 1 and s != "\u0345" + chr(c) + "\u0334":
            groups.setdefault(unicodedata.combining(chr(c)), []).append(c)
    for k, points in sorted(groups.items()):
        lines += wrap("class%d" % k, ranges(points))

    pairs = []
    for c in rest:
        d = unicodedata.decomposition(chr(c))
        if d and not d.startswith("<") and " " in d:
            pairs.append((c, "".join(chr(int(x, 16)) for x in d.split())))
    made = form(normalizers.NFC(), (p for _, p in pairs))
    lines += wrap("compose", ["%s=%x" % (code(p), c) for (c, p), m in zip(pairs, made) if m == chr(c)])
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------- files

def zipped(value):
    raw = json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode()
    return gzip.compress(raw, 9, mtime=0)


def same(path, data):
    if not os.path.exists(path):
        return False
    with open(path, "rb") as f:
        old = f.read()
    if path.endswith(".gz"):
        return gzip.decompress(old) == gzip.decompress(data)
    return old == data


def go_source(size):
    """The same texts as bench_test.go takes."""
    root = os.path.join(subprocess.run(["go", "env", "GOROOT"], capture_output=True, text=True, check=True).stdout.strip(), "src")
    paths = [os.path.relpath(os.path.join(d, name), root).split(os.sep) for d, _, names in os.walk(root) for name in names if name.endswith(".go")]
    texts = []
    for path in sorted(paths):
        if size <= 0:
            break
        with open(os.path.join(root, *path), "rb") as f:
            text = f.read()[:size].decode(errors="ignore")
        texts.append(text)
        size -= len(text.encode())
        if len(text) == 0:
            break
    return texts


def bench(size, names):
    texts = go_source(size)
    n = sum(len(t.encode()) for t in texts)
    print(f"{len(texts)} texts, {n} bytes, one thread; the best of two rounds", file=sys.stderr)
    for name in names or JSONS + MODELS:
        t = JSONFile(name).t if name in JSONS else PieceFile(name).t
        ways = [t.encode_batch, t.encode_batch_fast] if name in JSONS else [t.encode]
        best = 1e9
        for _ in range(2):
            for way in ways:
                start = time.perf_counter()
                way(texts)
                best = min(best, time.perf_counter() - start)
        print(f"{name} {n / best / 1e6:.3f} MB/s", flush=True)


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--check", action="store_true")
    a.add_argument("--train", action="store_true")
    a.add_argument("--random", type=int)
    a.add_argument("--bench", type=int)
    a.add_argument("names", nargs="*", help="the tokenizers that --bench runs; all if there is none")
    a.add_argument("-o", default=os.path.join(HERE, "random.json.gz"))
    o = a.parse_args()
    if o.bench:
        return bench(o.bench, o.names)
    if o.random:
        with open(o.o, "wb") as f:
            f.write(zipped(randoms(o.random)))
        return
    if o.train:
        train()
    files = {
        "texts.json": (json.dumps(TEXTS, indent=0) + "\n").encode(),
        "want.json.gz": zipped(want()),
        "random.json.gz": zipped(randoms(3000)),
        os.path.join("..", "unicode.txt"): unicode_table().encode(),
    }
    changed = [name for name, data in files.items() if not same(os.path.join(HERE, name), data)]
    if o.check:
        print("these files would change: " + ", ".join(changed) if changed else "the libraries still agree with every committed file")
        sys.exit(1 if changed else 0)
    for name in changed:
        with open(os.path.join(HERE, name), "wb") as f:
            f.write(files[name])
        print("wrote", name, len(files[name]), "bytes")


if __name__ == "__main__":
    main()
