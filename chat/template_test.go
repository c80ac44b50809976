package chat

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
)

func folder(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func none(string) ([][2]int, error) { return nil, nil }

func TestTemplatesAreFound(t *testing.T) {
	const config = `{"bos_token":"<s>","eos_token":{"content":"</s>"},"pad_token":null,"chat_template":`
	for _, tt := range []struct {
		name  string
		files map[string]string
		want  string // of a chat with and one without tools
	}{
		{"nothing", nil, ""},
		{"no template", map[string]string{"tokenizer_config.json": `{"bos_token":"<s>"}`}, ""},
		{"null", map[string]string{"tokenizer_config.json": config + `null}`}, ""},
		{"text", map[string]string{"tokenizer_config.json": config + `"{{ bos_token }}A{{ eos_token }}{{ pad_token }}"}`}, "<s>A</s> <s>A</s>"},
		{"file first", map[string]string{"tokenizer_config.json": config + `"A"}`, "chat_template.jinja": "B{{ bos_token }}\n"}, "B<s> B<s>"},
		{"json", map[string]string{"tokenizer_config.json": config + `"A"}`, "chat_template.json": `{"chat_template":"C"}`}, "C C"},
		{"list", map[string]string{"tokenizer_config.json": config + `[{"name":"default","template":"D"},{"name":"tool_use","template":"T{{ tools|tojson }}"},` +
			`{"name":"rag","template":"{% include x %}"}]}`}, `T[{"z": 1, "a": 2}] D`},
	} {
		got, err := FindTemplate(folder(t, tt.files))
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		if got == nil {
			if tt.want != "" {
				t.Errorf("%s: no template is found", tt.name)
			}
			continue
		}
		d := Document{Chat: []Message{{Role: "user", Content: "x"}}}
		plain, err := got.Render(d, none)
		if err != nil {
			t.Fatal(err)
		}
		for _, tools := range []string{`[{"z":1,"a":2}]`, `"[{\"z\":1,\"a\":2}]"`} {
			d.Tools = []byte(tools)
			with, err := got.Render(d, none)
			if err != nil || with.Text+" "+plain.Text != tt.want {
				t.Errorf("%s: %q %q, %v; want %s", tt.name, with.Text, plain.Text, err, tt.want)
			}
		}
	}
	for want, files := range map[string]map[string]string{
		"neither text nor a list":         {"tokenizer_config.json": `{"chat_template":3}`},
		"none of the chat templates":      {"tokenizer_config.json": `{"chat_template":[{"name":"x","template":"y"}]}`},
		`"include" is not supported`:      {"chat_template.jinja": "\n{% include 'x' %}"},
		"tokenizer_config.json cannot be": {"tokenizer_config.json": "x"},
	} {
		if _, err := FindTemplate(folder(t, files)); err == nil || !strings.Contains(err.Error(), want) || diag.From(err).Fix == "" {
			t.Errorf("%v; want %s", err, want)
		}
	}
}

// learned shows what is learned of a chat: the rest is in brackets.
func learned(t *testing.T, template string, chat []Message) (string, error) {
	t.Helper()
	found, err := FindTemplate(folder(t, map[string]string{"chat_template.jinja": template,
		"tokenizer_config.json": `{"eos_token":"</s>"}`}))
	if err != nil {
		t.Fatal(err)
	}
	r, err := found.Render(Document{Chat: chat}, none)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	at := 0
	for _, p := range r.Learned {
		b.WriteString("[" + r.Text[at:p[0]] + "]" + r.Text[p[0]:p[1]])
		at = p[1]
	}
	return b.String() + "[" + r.Text[at:] + "]", nil
}

func TestWhatIsLearnedIsFound(t *testing.T) {
	say := func(role, content string, learn bool) Message {
		return Message{Role: role, Content: content, Learned: learn}
	}
	chat := []Message{say("user", "a", false), say("assistant", "b", true), say("user", "c", false), say("assistant", "d", true)}
	half := []Message{chat[0], say("assistant", "b", false), chat[2], chat[3]}
	const body = "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
	const marks = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }};{% endgeneration %}" +
		"{% else %}{{ m.content }};{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
	const last = "{% for m in messages %}<{{ m.role }}>{% if loop.last %}think {% endif %}{{ m.content }};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
	for _, tt := range []struct {
		name, template string
		chat           []Message
		want, err      string
	}{
		{"prefixes", body, chat, "[<user>a;<assistant>]b;[<user>c;<assistant>]d;[]", ""},
		{"marks", marks, chat, "[<user>a;<assistant>]b;[<user>c;<assistant>]d;[]", ""},
		{"half by prefixes", body, half, "[<user>a;<assistant>b;<user>c;<assistant>]d;[]", ""},
		{"half by marks", marks, half, "[<user>a;<assistant>b;<user>c;<assistant>]d;[]", ""},
		{"an end of its own", body + "{% if not add_generation_prompt %}</s>{% endif %}", chat,
			"[<user>a;<assistant>]b;[<user>c;<assistant>]d;</s>[]", ""},
		{"moves", strings.Replace(last, "if loop.last", "if loop.last and m.role == 'assistant'", 1), chat, "", "the first 2 messages otherwise"},
		{"one that moves no more", strings.Replace(last, "if loop.last", "if loop.last and m.role == 'assistant'", 1), half,
			"[<user>a;<assistant>b;<user>c;<assistant>]think d;[]", ""},
		{"another prompt", strings.Replace(body, "<assistant>{%", "<model>{%", 1), chat, "", "before message 2 is not what it gives"},
		{"refuses", "{{ raise_exception('only ' ~ messages|length) }}", chat, "", "the template refuses the chat: only 4"},
		{"nothing said", body, chat[:1], "[<user>a;]", ""},
	} {
		got, err := learned(t, tt.template, tt.chat)
		if tt.err == "" && (err != nil || got != tt.want) {
			t.Errorf("%s: %q, %v; want %q", tt.name, got, err, tt.want)
		}
		if tt.err != "" && (!errors.Is(err, diag.DataTemplate) || !strings.Contains(err.Error(), tt.err) || diag.From(err).Fix == "") {
			t.Errorf("%s: %v; want %s", tt.name, err, tt.err)
		}
	}
}
