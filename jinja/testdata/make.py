#!/usr/bin/env python3
"""Makes what the tests of this package compare with, by asking the library it must agree with.

    pip install transformers==5.22.2
    python3 make.py                        # writes want.json.gz
    python3 make.py --check                # writes nothing; exit status 1 if the file would change
    python3 make.py --templates TRL.whl    # takes templates.json.gz from a wheel of trl 1.16.0

templates.json.gz has the chat templates that trl brings (Apache License 2.0, Copyright the Hugging
Face Team): of 41 models, and 31 that it trains some of them with.
"""

import datetime
import gzip
import json
import os
import sys
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.join(HERE, "templates.json.gz")
WANT = os.path.join(HERE, "want.json.gz")


def load(path):
    with gzip.open(path, "rt", encoding="utf-8") as f:
        return json.load(f)


def packed(value):
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return gzip.compress(text.encode(), 9, mtime=0)


TOOLS = [
    {"type": "function", "function": {
        "name": "weather", "description": "Weather in a city, \"now\" – <b>°C</b> & more",
        "parameters": {"type": "object", "properties": {
            "city": {"type": "string", "description": "Die Größe"},
            "days": {"type": "integer", "minimum": 1, "maximum": 7, "default": 3},
            "a": {"type": "array", "items": {"type": "number"}, "enum": [1.5, 2.0, 1e-7, 1e20]}},
            "required": ["city"]},
        "return": {"type": "string"}}},
    {"type": "function", "function": {"name": "ab", "description": "", "parameters": {
        "type": "object", "properties": {}}}},
]


def call(name, arguments, **more):
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


U, A, S, T = "user", "assistant", "system", "tool"


def say(role, content, **more):
    return {"role": role, "content": content, **more}


CHATS = {
    "ask": [say(U, "What is 2+2?")],
    "answer": [say(U, "What is 2+2?"), say(A, "4")],
    "turns": [say(S, "Be brief.\n"), say(U, " Hi "), say(A, "\nHello!\n\n"), say(U, "Größe? 日本 👩‍🚀"),
              say(A, "naïve \"quotes\" & <tags> {x} \\n"), say(U, "")],
    "call": [say(S, "Use tools."), say(U, "Weather in Köln?"),
             say(A, "", tool_calls=[call("weather", {"city": "Köln", "days": 2, "b": None, "a": [1, 2.5, True]},
                                         id="call00001")]),
             say(T, "{\"t\": 21.5}", name="weather", tool_call_id="call00001"), say(A, "21.5 °C.")],
    "calls": [say(U, "Both?"),
              say(A, "I look.", tool_calls=[call("weather", {"city": "A"}, id="abcdefghi"), call("ab", {}, id="123456789")]),
              say(T, "x", name="weather", tool_call_id="abcdefghi"), say(T, "y", name="ab", tool_call_id="123456789"),
              say(A, "Done."), say(U, "Thanks"), say(A, "Welcome")],
    "nocontent": [say(U, "Go"), {"role": A, "tool_calls": [call("ab", {"x": "y"})]}, say(T, "ok"), say(A, "Done.")],
    "nullcontent": [say(U, "Go"), say(A, None, tool_calls=[call("ab", {"x": "y"})]), say(T, "ok"), say(A, "Done.")],
    "stringcall": [say(U, "Go"), say(A, "", tool_calls=[call("ab", "{\"z\": 1, \"a\": 2}")]), say(T, "ok"), say(A, "!")],
    "parts": [say(S, [{"type": "text", "text": "Sys."}]),
              say(U, [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]),
              say(A, [{"type": "text", "text": "General"}])],
    "think": [say(U, "1+1?"), say(A, "<think>\none and one\n</think>\n\n2"), say(U, "2+2?"),
              say(A, "<think>two and two</think>4")],
    "reasoning": [say(U, "1+1?"), say(A, "2", reasoning_content="one and one"), say(U, "and?"),
                  say(A, "3", reasoning_content="plus\none", thinking="x", reasoning="y")],
    "developer": [say("developer", "Dev."), say(U, "Hi"), say(A, "Ho")],
    "odd": [say(A, "first"), say(A, "second"), say(U, "third")],
    "image": [say(U, [{"type": "image"}, {"type": "text", "text": "What is this?"}]), say(A, [{"type": "text", "text": "A"}])],
    "empty": [],
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def render(chat_template_utils, template, chat, tools, prompt, more):
    def place(text, i):  # in bytes
        return len(text[:i].encode())

    try:
        texts, spans = chat_template_utils.render_jinja_template(
            conversations=[chat], tools=tools, chat_template=template, return_assistant_tokens_mask=True,
            add_generation_prompt=prompt, **SPECIAL, **more)
    except Exception as e:  # what the template raises is a part of what it says
        return {"error": f"{type(e).__name__}: {e}"[:200]}
    text = texts[0]
    return {"text": text, "said": [[place(text, a), place(text, b)] for a, b in spans[0]]}


# Small templates for what the language does and the models' do not show.
LANGUAGE = {
    "blanks": "a\n  {% if true %}\n  b\n  {%- endif %}\n  {{ 'c' }}\n{#- x -#}\n  d {%+ if true %} e {% endif +%}\n f\n",
    "raw": "{% raw %}{{ x }}{% endraw %}\n  {%- raw -%} {% y %} {%- endraw %} z",
    "strings": "{{ 'a\\n\\t\\x41\\u00e9\\\\ \\'q\\'' 'b' }}|{{ \"it's\" ~ 1 ~ none ~ true ~ 1.0 ~ [1,'a',\"b'c\"] ~ {'k': none} }}",
    "numbers": "{{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 2 ** 10 }} {{ 1e16 }} {{ 1e-5 }} {{ 0.1 + 0.2 }}"
               " {{ 1_000 }} {{ 3.0 }} {{ -3|abs }} {{ 2.567|round(1) }} {{ '12'|int + 1 }} {{ 'x'|int(7) }} {{ '1.5'|float }}",
    "slices": "{{ 'häßlich'[1:4] }}{{ 'abc'[::-1] }}{{ 'abc'[-1] }}{{ [1,2,3,4][1:-1] }}{{ [1,2,3,4][::2] }}{{ [1,2,3][5:] }}"
              "{{ 'abc'[3:0:-1] }}{{ messages[:-1]|length }}",
    "loops": "{% for x in [1,2,3,4,5] if x != 2 %}{% if x == 4 %}{% continue %}{% endif %}{{ loop.index }}{{ loop.first }}"
             "{{ loop.last }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.cycle('a','b') }}{{ loop.changed(x > 2) }},{% else %}none"
             "{% endfor %}{% for x in [] %}{% else %}none{% endfor %}{% for k, v in {'b': 1, 'a': 2}.items() %}{{ k }}{{ v }}{% endfor %}",
    "scopes": "{% set x = 1 %}{% for i in [1,2] %}{{ x }}{% set x = 5 %}{{ x }}{% endfor %}{{ x }}{% if true %}{% set x = 7 %}{% endif %}"
              "{{ x }}{% set ns = namespace(n=0, s='') %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
    "macros": "{% macro f(a, b='x', c=none) %}[{{ a }}{{ b }}{{ c }}{{ g }}]{% endmacro %}{% set g = 9 %}{{ f(1) }}{{ f(1, 2) }}{{ f(1, c=3) }}"
              "{{ f() }}{% macro r(n) %}{{ n }}{% if n %}{{ r(n - 1) }}{% endif %}{% endmacro %}{{ r(3) }}"
              "{% macro w(x) %}<{{ caller() }}{{ x }}>{% endmacro %}{% call w(1) %}in{% endcall %}",
    "filters": "{{ ' a '|trim }}{{ [3,1,2]|sort|join('-') }}{{ ['b','A']|sort }}{{ 'hello world'|title }}{{ 'hELLO'|capitalize }}"
               "{{ [1,2]|first }}{{ [1,2]|last }}{{ {'b':1,'a':2}|dictsort }}{{ [1,1,2]|unique|list }}{{ 'a\nb\n\nc'|indent(2) }}"
               "{{ [{'a':1},{'a':2}]|map(attribute='a')|list }}{{ ['a','b']|map('upper')|join }}{{ x|default('d') }}{{ ''|d('e', true) }}"
               "{{ [{'a':1,'b':{'c':2}},{'a':2}]|selectattr('a','equalto',1)|list }}{{ [{'a':1}]|rejectattr('a')|list }}"
               "{{ [1,2,3]|select('odd')|list }}{{ [1,2,3]|sum }}{{ [1,3,2]|max }}{{ 'abc'|length }}{{ 'aab'|replace('a','x',1) }}"
               "{{ [1,2]|reverse|list }}{{ 'abc'|list }}{{ 5|string + '5' }}",
    "tojson": "{{ {'b': [1, 2.5, none, true], 'a': 'ä\"\\n<>&\\u0001'}|tojson }}{{ {'b': {'c': []}, 'a': {}}|tojson(indent=2) }}"
              "{{ {'b': 1, 'a': 2}|tojson(separators=(',', ':')) }}{{ {'b': 1, 'a': '日'}|tojson(sort_keys=true, ensure_ascii=true) }}"
              "{{ [1, [2, {'x': 3}]]|tojson(indent=4) }}",
    "methods": "{{ ' a b '.strip() }}{{ 'xxaxx'.lstrip('x') }}{{ 'a,b,,c'.split(',') }}{{ ' a  b '.split() }}{{ 'a-b-c'.rsplit('-', 1) }}"
               "{{ 'a-b-c'.split('-', 1)[1] }}{{ 'abc'.startswith(('x','a')) }}{{ 'it\\'s a tEst'.title() }}{{ 'abc'.find('c') }}"
               "{{ '-'.join(['a','b']) }}{{ 'a\nb\r\nc\n'.splitlines() }}{{ {'a': 1}.get('b', 'x') }}{{ {'a': 1}.keys()|list }}"
               "{{ 'abcabc'.replace('b', '') }}{{ 'aXb'.lower() }}{{ '12'.isdigit() }}{{ 'abc'.removeprefix('a') }}{{ [1,2,1].count(1) }}",
    "tests": "{{ x is defined }}{{ messages is defined }}{{ none is none }}{{ 'a' is string }}{{ {} is mapping }}{{ [] is iterable }}"
             "{{ 'a' is iterable }}{{ 1 is number }}{{ true is number }}{{ true is integer }}{{ 1.0 is float }}{{ 3 is odd }}{{ 4 is divisibleby 2 }}"
             "{{ 1 is in [1] }}{{ true is true }}{{ x is undefined and x is not defined }}{{ 2 is eq 2 }}{{ 1 is boolean }}",
    "logic": "{{ 0 or 'a' }}{{ '' and 1 }}{{ not [] }}{{ 1 < 2 < 3 }}{{ 'a' in 'abc' }}{{ 'x' not in {'x': 1} }}{{ 1 == 1.0 }}{{ 'a' if x }}"
             "{{ 'a' if x else 'b' if y else 'c' }}{{ [1,2] == [1,2] }}{{ {'a':1} == {'a':1} }}{{ x == y }}{{ none == x }}{{ (x.y is defined) if x }}",
    "chained": "{{ x is defined if x }}",
    "undefinedattr": "{{ x.y }}",
    "undefinedadd": "{{ x + 'a' }}",
    "noneadd": "{{ none + 'a' }}",
    "raise": "{{ raise_exception('No ' ~ messages|length) }}",
    "date": "{{ strftime_now('%d %B %Y %b %H:%M') }}",
    "append": "{% set l = [] %}{{ l.append(1) }}",
    "block": "{% set x %}a{{ 1 }}{% endset %}{{ x }}{% set y | upper %}abc{% endset %}{{ y }}{% filter upper %}q{% endfilter %}",
    "generation": "{% for m in messages %}x{% generation %}é{{ m.content }}{% set q = 1 %}{% endgeneration %}{{ q }}{% endfor %}",
    "sets": "{% set a, b = 1, 'x' %}{{ a }}{{ b }}{% for a, b in [(1, 2), (3, 4)] %}{{ a + b }}{% endfor %}",
    "crlf": "a\r\n{% if true %}\r\nb{% endif %}\r\n",
    "concat": "{{ 'a' ~ 1 + 2 }}{{ 1 - 1 ~ 'b' }}",
    "items": "{% for k in {'z': 1, 'y': 2} %}{{ k }}{% endfor %}{{ {'items': 3}['items'] }}{{ [[1,2],[3,4]]|map('first')|list }}",
}


def want():
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers.utils import chat_template_utils

    class Fixed(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2024, 7, 26, 13, 5, 9)

    chat_template_utils.datetime = Fixed
    out = {"chats": CHATS, "tools": TOOLS, "special": SPECIAL, "language": {}, "models": {}}
    for name, text in LANGUAGE.items():
        out["language"][name] = {"template": text, **render(chat_template_utils, text, CHATS["turns"], None, False, {})}
    for name, text in load(SOURCE).items():
        rows = out["models"][name] = {}
        for chat, messages in CHATS.items():
            for tools in [None, TOOLS] if chat in ("ask", "call", "calls", "turns") else [None]:
                for prompt in [False, True] if messages and messages[-1]["role"] == U else [False]:
                    key = chat + ("+tools" if tools else "") + ("+prompt" if prompt else "")
                    rows[key] = render(chat_template_utils, text, messages, tools, prompt, {})
    return packed(out)


def main():
    if "--templates" in sys.argv:
        wheel = zipfile.ZipFile(sys.argv[sys.argv.index("--templates") + 1])
        names = sorted(n for n in wheel.namelist() if n.startswith("trl/chat_templates/") and n.endswith(".jinja"))
        texts = {os.path.basename(n)[:-len(".jinja")]: wheel.read(n).decode() for n in names}
        with open(SOURCE, "wb") as f:
            f.write(packed(texts))
        print(f"{len(texts)} templates")
        return 0
    new = want()
    if "--check" in sys.argv:
        old = open(WANT, "rb").read()
        if gzip.decompress(old) != gzip.decompress(new):
            print("want.json.gz would change")
            return 1
        print("want.json.gz is what the library says")
        return 0
    with open(WANT, "wb") as f:
        f.write(new)
    rows = [r for m in load(WANT)["models"].values() for r in m.values()]
    print(len(rows), "renderings,", sum("error" in r for r in rows), "errors,", len(new), "bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
