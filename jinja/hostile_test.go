package jinja

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/deepwell/deepwell/diag"
)

// What is not known is refused by name, when the template is read.
func TestUnknownIsRefused(t *testing.T) {
	for text, want := range map[string]string{
		"{% include 'x' %}":                      `the statement "include" is not supported`,
		"{% extends 'x' %}":                      `the statement "extends" is not supported`,
		"\n{{ x|xmlattr }}":                      `the filter "xmlattr" is not supported; at line 2`,
		"{{ x is odder }}":                       `the test "odder" is not supported`,
		"{{ f(*x) }}":                            "unpacked",
		"{% for x in y recursive %}{% endfor %}": "recursive",
		"{% if x %}":                             `"endif" is missing`,
		"{% endif %}":                            `nothing that "endif" ends`,
		"{{ x":                                   "not closed",
		"{# x":                                   "a comment is not closed",
		"{% raw %}x":                             "raw is not closed",
		"{{ 'x }}":                               "a string is not closed",
		"{{ 1 2 }}":                              `"2" is too much`,
		"{{ }}":                                  "where a value belongs",
		"{% break %}":                            "outside of a loop",
		"{% macro f() %}{% generation %}{% endgeneration %}{% endmacro %}": "generation stands in a macro",
		"{{ ? }}":         "does not belong here",
		"{{ '\\ud800' }}": "is no character",
		"{{ a" + strings.Repeat("[a", 200) + strings.Repeat("]", 200) + " }}": "nests deeper",
		strings.Repeat("{% if a %}", 200):                                     "nests deeper",
		strings.Repeat("x", maxTemplate+1):                                    "more than",
		"\xff":                                                                "not UTF-8",
	} {
		if _, err := Parse(text); !errors.Is(err, diag.DataTemplate) || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60q: %.200v; want %s", text, err, want)
		}
	}
}

// A template that would take the machine's time or memory ends with an error, soon.
func TestBoundsOfARun(t *testing.T) {
	for text, want := range map[string]string{
		"{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}": "steps",
		"{{ range(100001) }}":      "more than 100000 numbers",
		"{{ 'a' * 1000000000 }}":   "MiB",
		"{{ 'abc' * 4000000000 }}": "MiB",
		"{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}":               "MiB",
		"{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(99) %}{% set ns.s = ns.s|replace('a', 'aaaa') %}{% endfor %}": "MiB",
		"{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}":                      "MiB",
		"{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}":           "steps",
		"{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = [ns.s] %}{% endfor %}{{ ns.s|tojson }}":          "",
		"{% set ns = namespace(s=[1]) %}{% for i in range(101) %}{% set ns.s = [ns.s] %}{% endfor %}{{ ns.s|tojson }}":         "nests deeper",
		"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}":                                                                      "deeper than 100",
		"{{ 9223372036854775807 + 1 }}":      "too large",
		"{{ 2 ** 64 }}":                      "not supported",
		"{{ 1 // 0 }}":                       "division by zero",
		"{{ x() }}":                          "x is not defined",
		"{{ 'a'.format(1) }}":                `the method "format" is not supported`,
		"{{ [1].append(2) }}":                `the method "append" is not supported`,
		"{{ 'abc'[::9223372036854775807] }}": "",
		"{{ namespace() }}":                  "cannot be printed",
	} {
		parsed, err := Parse(text)
		began := time.Now()
		if err == nil {
			_, err = parsed.Render(nil, now)
		}
		if want == "" && err == nil {
			continue
		}
		if !errors.Is(err, diag.DataTemplate) || !strings.Contains(err.Error(), want) {
			t.Errorf("%.90q: %.200v; want %s", text, err, want)
		}
		if took := time.Since(began); took > time.Minute {
			t.Errorf("%.90q took %v", text, took)
		}
	}
}

func TestDecodeKeepsOrder(t *testing.T) {
	v, err := Decode([]byte(`{"z": 1, "a": [1.5, null, true, "x"], "m": {"q": 1, "b": 2}, "z": 3}`))
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := Parse("{{ v|tojson }}")
	if err != nil {
		t.Fatal(err)
	}
	out, err := parsed.Render(map[string]any{"v": v}, now)
	if want := `{"z": 3, "a": [1.5, null, true, "x"], "m": {"q": 1, "b": 2}}`; err != nil || out.Text != want {
		t.Errorf("%s, %v", out.Text, err)
	}
	for _, bad := range []string{"", "{", "[1,", "1 2", "99999999999999999999", strings.Repeat("[", 300)} {
		if _, err := Decode([]byte(bad)); err == nil {
			t.Errorf("%.20q is read", bad)
		}
	}
}

// Whatever a template is, reading and running it ends without a panic, with an error of its code.
func FuzzTemplate(f *testing.F) {
	var want fixture
	readGzip(f, "want.json.gz", &want)
	for _, one := range want.Language {
		f.Add(one.Template)
	}
	var templates map[string]string
	readGzip(f, "templates.json.gz", &templates)
	for _, name := range []string{"qwen3", "gptoss", "llama3_1", "deepseekv3", "gemma4_v5", "phi3_training"} {
		f.Add(templates[name])
	}
	vars := want.vars(f, "call", true, true)
	f.Fuzz(func(t *testing.T, text string) {
		parsed, err := Parse(text)
		if err == nil {
			var out Output
			out, err = parsed.Render(vars, now)
			for _, said := range out.Said {
				if said[0] < 0 || said[0] > said[1] || said[1] > len(out.Text) {
					t.Fatalf("%v of %d bytes", said, len(out.Text))
				}
			}
			if len(out.Text) > maxBytes {
				t.Fatalf("%d bytes", len(out.Text))
			}
		}
		if err != nil && !errors.Is(err, diag.DataTemplate) {
			t.Fatalf("an error without its code: %v", err)
		}
	})
}
