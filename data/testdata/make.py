#!/usr/bin/env python3
"""Makes what the tests of this package compare with, by asking the libraries it must agree with.

    pip install tokenizers==0.23.3 transformers==5.22.2
    python3 make.py            # writes chat.json and families.json.gz
    python3 make.py --check    # writes nothing; exit status 1 if a committed file would change
    pip install pyarrow==26.0.1
    python3 make.py --parquet  # writes *.parquet; another version of pyarrow writes other bytes

tokenizer.json is written by go test -run Chats -update.
"""

import datetime
import gzip
import json
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))

TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n"
              "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
              "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}",
    "llama3": "<|begin_of_text|>{% for m in messages %}<|start_header_id|>"
              "{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>{{ '\n\n' }}"
              "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}<|eot_id|>{% endgeneration %}"
              "{% else %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}",
}

CHATS = [
    [("user", "the quick fox?"), ("assistant", "the lazy dog.")],
    [("system", "the dog\n"), ("user", "\n\nfox 12345  "), ("assistant", "jumps over"),
     ("tool", "{\"x\": 1}"), ("user", ""), ("assistant", "naïve 日本 👩‍🚀 "), ("user", "no answer")],
    [("assistant", "first"), ("assistant", "second\n\n")],
    [("user", " ")],
]


def rows():
    return [{"text": None if i == 3 else f"row {i}: the quick brown fox " * (i % 5 + 1), "n": i} for i in range(40)]


def chats():
    from transformers import PreTrainedTokenizerFast
    tok = PreTrainedTokenizerFast(tokenizer_file=os.path.join(HERE, "tokenizer.json"))
    out = []
    for name, template in TEMPLATES.items():
        for chat in CHATS:
            messages = [{"role": r, "content": c} for r, c in chat]
            got = tok.apply_chat_template(messages, chat_template=template, return_dict=True,
                                          return_assistant_tokens_mask=True)
            out.append({"template": name, "messages": messages, "ids": got["input_ids"],
                        "learned": got["assistant_masks"]})
    return "[\n" + ",\n".join(json.dumps(c) for c in out) + "\n]\n"


# The families whose own templates are run: the tokenizer of the package tokenizer that spells as the
# family does, the template of trl, and the tokens that begin and end a text. The special tokens that
# the template writes are added to the tokenizer.
FAMILIES = {
    "llama3": ("llama3", "llama3_1", "<|begin_of_text|>", "<|eot_id|>"),
    "qwen2.5": ("qwen2", "qwen2_5", None, "<|im_end|>"),
    "qwen3": ("qwen2", "qwen3", None, "<|im_end|>"),
    "deepseek-v3": ("deepseek", "deepseekv3", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "gemma": ("gemma", "gemma", "<bos>", "<eos>"),
    "gemma3": ("gemma", "gemma3", "<bos>", "<eos>"),
    "phi3": ("phi3", "phi3", "<s>", "<|endoftext|>"),
    "glm4": ("llama3", "glm4moe", None, "<|endoftext|>"),
    "gpt-oss": ("nemo", "gptoss", None, "<|return|>"),
    "cohere": ("gpt2", "cohere", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "lfm2": ("llama3", "lfm2", "<|startoftext|>", "<|im_end|>"),
    "nemotron3": ("nemo", "nemotron_3_nano", "<s>", "<|im_end|>"),
}
SPECIAL = re.compile(r"<\|[^|<>\s]+\|>|<｜[^｜]+｜>|<(?:start|end)_of_turn>|\[/?INST\]|\[gMASK\]|<sop>")


def family_chats(shared):
    for name in ["ask", "answer", "turns", "call", "calls", "think", "reasoning", "nullcontent"]:
        for tools in [None, shared["tools"]] if name in ("call", "calls") else [None]:
            yield name + ("+tools" if tools else ""), shared["chats"][name], tools
    yield "blanks", [{"role": "user", "content": "\n a "}, {"role": "assistant", "content": "\n\n  b\n"},
                     {"role": "user", "content": "c"}, {"role": "assistant", "content": " "}], None


def families():
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import chat_template_utils

    class Fixed(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2024, 7, 26)

    chat_template_utils.datetime = Fixed
    root = os.path.join(HERE, "..", "..")
    with gzip.open(os.path.join(root, "jinja", "testdata", "templates.json.gz"), "rt", encoding="utf-8") as f:
        templates = json.load(f)
    with gzip.open(os.path.join(root, "jinja", "testdata", "want.json.gz"), "rt", encoding="utf-8") as f:
        shared = json.load(f)
    out = {}
    for family, (file, template, bos, eos) in FAMILIES.items():
        base = Tokenizer.from_file(os.path.join(root, "tokenizer", "testdata", file + ".json"))
        text = templates[template]
        base.add_special_tokens(sorted(set(SPECIAL.findall(text)) | {t for t in (bos, eos) if t}))
        tok = PreTrainedTokenizerFast(tokenizer_object=base, **{k: v for k, v in
                                                                (("bos_token", bos), ("eos_token", eos)) if v})
        one = out[family] = {"tokenizer": base.to_str(), "template": text, "bos": bos, "eos": eos, "rows": {},
                             "training": templates.get(template + "_training")}
        for name, messages, tools in family_chats(shared):
            def ids(template, **more):
                try:
                    return tok.apply_chat_template(messages, tools=tools, chat_template=template, return_dict=True, **more)
                except Exception:  # the template refuses the chat
                    return None
            row = one["rows"][name] = {"messages": messages, "tools": tools}
            if (got := ids(text)) is not None:
                row["ids"] = got["input_ids"]
            if one["training"] and (got := ids(one["training"], return_assistant_tokens_mask=True)) is not None:
                row["training_ids"], row["training_mask"] = got["input_ids"], got["assistant_masks"]
    text = json.dumps(out, ensure_ascii=False, separators=(",", ":"))
    return gzip.compress(text.encode(), 9, mtime=0)


def parquet():
    import pyarrow as pa
    import pyarrow.parquet as pq
    path = lambda name: os.path.join(HERE, name)
    pq.write_table(pa.Table.from_pylist(rows()), path("text.parquet"), compression="zstd", row_group_size=16)
    messages = [{"id": i, "messages": [{"role": r, "content": c} for r, c in chat]}
                for i, chat in enumerate(CHATS + [[]])]
    pq.write_table(pa.Table.from_pylist(messages), path("chat.parquet"), compression="snappy", row_group_size=2)
    pq.write_table(pa.Table.from_pylist([{"body": "the fox", "title": "dog"}]), path("other.parquet"))


def main():
    if "--parquet" in sys.argv:
        return parquet()
    path, text = os.path.join(HERE, "chat.json"), chats()
    packed, family = os.path.join(HERE, "families.json.gz"), families()
    if "--check" in sys.argv:
        if open(path, encoding="utf-8").read() != text:
            sys.exit("chat.json would change")
        if gzip.decompress(open(packed, "rb").read()) != gzip.decompress(family):
            sys.exit("families.json.gz would change")
        return print("chat.json and families.json.gz are what the libraries give")
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)
    with open(packed, "wb") as f:
        f.write(family)


if __name__ == "__main__":
    main()
