#!/usr/bin/env python3
"""Makes what the tests of this package compare with, by asking the libraries it must agree with.

    pip install tokenizers==0.23.3 transformers==5.22.2
    python3 make.py            # writes chat.json
    python3 make.py --check    # writes nothing; exit status 1 if a committed file would change
    pip install pyarrow==26.0.1
    python3 make.py --parquet  # writes *.parquet; another version of pyarrow writes other bytes

tokenizer.json is written by go test -run Chats -update.
"""

import json
import os
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
    if "--check" in sys.argv:
        if open(path, encoding="utf-8").read() != text:
            sys.exit("chat.json would change")
        return print("chat.json is what the libraries give")
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)


if __name__ == "__main__":
    main()
