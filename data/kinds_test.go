package data

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/deepwell/deepwell/chat"
	"github.com/deepwell/deepwell/diag"
)

// Rows are read alike from lines and from tables, and what is given is not learned.
func TestKindsOfRows(t *testing.T) {
	const asked = "[<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n]the dog<|im_end|>[\n<|endoftext|>]"
	dir := write(t, map[string]string{
		"completion.jsonl": `{"prompt":"the fox ","completion":"the dog"}` + "\n" + `{"prompt":"","completion":"the dog"}`,
		"completion.csv":   "\ufeffprompt,completion\nthe fox ,the dog\n,the dog\n",
		"alpaca.jsonl":     `{"instruction":"the fox","input":"","output":"the dog"}`,
		"alpaca.tsv":       "output\tid\tinput\tinstruction\nthe dog\t7\t\tthe fox\n",
		"sharegpt.jsonl":   `{"conversations":[{"from":"human","value":"the fox"},{"from":"gpt","value":"the dog"}]}`,
		"messages.csv":     "messages\n" + `"[{""role"":""user"",""content"":""the fox""},{""role"":""assistant"",""content"":""the dog""}]"`,
		"named.csv":        "q,a\nthe fox,the dog\n",
		"text.csv":         "id,text\n1,\"the fox, \"\"the\"\"\ndog\"\n",
		"prompts.jsonl":    `{"prompt":[{"role":"user","content":"the fox"}],"completion":[{"role":"assistant","content":"the dog"}]}`,
	})
	for name, want := range map[string][]string{
		"completion.jsonl": {"[the fox ]the dog<|endoftext|>", "the dog<|endoftext|>"},
		"completion.csv":   {"[the fox ]the dog<|endoftext|>", "the dog<|endoftext|>"},
		"alpaca.jsonl":     {asked}, "alpaca.tsv": {asked}, "sharegpt.jsonl": {asked}, "messages.csv": {asked},
		"prompts.jsonl": {asked}, "named.csv": {asked},
		"text.csv": {"the fox, \"the\"\ndog<|endoftext|>"},
	} {
		s := Source{Path: dir + "/" + name}
		if name == "named.csv" {
			s.Columns = chat.Columns{"instruction": "q", "output": "a"}
		}
		got, err := documents(t, s, "")
		if diff := cmp.Diff(want, got); diff != "" || err != nil {
			t.Errorf("%s: %v %s", name, err, diff)
		}
	}
}

func TestBadTablesAreNamed(t *testing.T) {
	for _, tt := range []struct{ name, text, want string }{
		{"x.csv", "text\na\nb,c\n", "x.csv:3"},
		{"x.csv", "text\na\nb,c\n", "as many columns"},
		{"x.csv", "text\n\"a\n", "put text with quotes into quotes"},
		{"x.csv", "text\nb\ncaf\xe9\n", "x.csv:3"},
		{"x.csv", "prompt;completion\na;b\n", "separate the columns with commas"},
		{"x.csv", "a,b\n1,2\n", `it has "a", "b"`},
		{"x.csv", "text\n\"" + strings.Repeat("a", DefaultDocument+1<<17), "the limit is 16 MiB"},
		{"x.tsv", "text\tb\n1\n", "x.tsv:2"},
		{"x.jsonl", "{\"text\":\"a\"}\n{\"text\":\"caf\xe9\"}", "x.jsonl:2"},
		{"x.jsonl", `{"messages":[{"role":"assistant","content":"","tool_calls":[{}]}]}`, "message 1 calls a tool"},
		{"x.jsonl", `{"messages":[{"role":"assistant","content":"a"}],"tools":[{}]}`, "the row has tools"},
	} {
		dir := write(t, map[string]string{tt.name: tt.text})
		_, err := documents(t, Source{Path: dir}, "")
		if !errors.Is(err, diag.DataFormat) || !strings.Contains(diag.From(err).Format(), tt.want) ||
			diag.From(err).Fix == "" {
			t.Errorf("%.40q: %.300v; want %s", tt.text, err, tt.want)
		}
	}
}

// Columns are part of what tokens are made of; without them, caches and digests are what they were.
func TestColumnsMakeOtherTokens(t *testing.T) {
	dir := write(t, map[string]string{"x.jsonl": strings.Repeat(`{"text":"the fox and the dog","body":"the dog"}`+"\n", 9)})
	plain := open(t, Options{Sources: []Source{{Path: dir}}, Seq: 8})
	named := open(t, Options{Sources: []Source{{Path: dir, Columns: chat.Columns{"text": "body"}}}, Seq: 8})
	if plain.Digest() == named.Digest() || plain.Tokens() <= named.Tokens() {
		t.Errorf("%s with %d tokens, %s with %d", plain.Digest(), plain.Tokens(), named.Digest(), named.Tokens())
	}
	_, err := tryOpen(t, Options{Sources: []Source{{Path: dir, Columns: chat.Columns{"txt": "body"}}}})
	if !errors.Is(err, diag.BadInput) {
		t.Error(err)
	}
}
