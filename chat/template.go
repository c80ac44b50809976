package chat

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/safedir"
	"github.com/deepwell/deepwell/jinja"
)

// A Template is the chat template that a model brings. It does not change.
type Template struct {
	Path string // of the file that it stands in
	// Digest names the template and the tokens that it writes.
	Digest string
	plain  *jinja.Template // nil if there are only others
	tools  *jinja.Template // for chats with tools, if the model has one of its own for them
	tokens map[string]any  // bos_token and the like
}

// maxTemplateFile bounds the files that a template is read from.
const maxTemplateFile = 64 << 20

// FindTemplate reads the chat template of a model's folder: chat_template.jinja, chat_template.json
// or the chat_template of tokenizer_config.json, in the order of transformers; nil if it has no
// template. One that cannot be read is an error that matters where there are chats.
func FindTemplate(dir string) (*Template, error) {
	config, err := readObject(filepath.Join(dir, "tokenizer_config.json"))
	if err != nil {
		return nil, err
	}
	t := &Template{tokens: map[string]any{}}
	for key, raw := range config {
		var token string
		var object struct{ Content string }
		if strings.HasSuffix(key, "_token") {
			if json.Unmarshal(raw, &token) != nil && json.Unmarshal(raw, &object) == nil {
				token = object.Content
			}
			if token != "" {
				t.tokens[key] = token
			}
		}
	}
	named, err := t.read(dir, config)
	if err != nil || len(named) == 0 {
		return nil, err
	}
	return t, t.parse(named)
}

// read finds the texts of the templates by name.
func (t *Template) read(dir string, config map[string]json.RawMessage) (map[string]string, error) {
	t.Path = filepath.Join(dir, "chat_template.jinja")
	text, err := safedir.ReadPlain(t.Path, maxTemplateFile)
	if err == nil {
		return map[string]string{"default": string(text)}, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return nil, diag.New(diag.FileError, "cannot read the chat template").At("%s", t.Path).Wrap(err)
	}
	t.Path = filepath.Join(dir, "chat_template.json")
	object, err := readObject(t.Path)
	if err != nil {
		return nil, err
	}
	raw := object["chat_template"]
	if raw == nil {
		t.Path = filepath.Join(dir, "tokenizer_config.json")
		raw = config["chat_template"]
	}
	if raw == nil || string(raw) == "null" {
		return nil, nil
	}
	var one string
	if json.Unmarshal(raw, &one) == nil {
		return map[string]string{"default": one}, nil
	}
	var list []struct{ Name, Template string }
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, diag.New(diag.DataTemplate, "chat_template is neither text nor a list of templates").
			At("%s", t.Path).Try("correct the file, or name a built-in template: template = \"chatml\"")
	}
	named := map[string]string{}
	for _, one := range list {
		named[one.Name] = one.Template
	}
	return named, nil
}

// readObject reads a JSON object; a file that is not there is empty.
func readObject(path string) (map[string]json.RawMessage, error) {
	text, err := safedir.ReadPlain(path, maxTemplateFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var object map[string]json.RawMessage
	if err == nil {
		err = json.Unmarshal(text, &object)
	}
	if err != nil {
		return nil, diag.New(diag.BadInput, "%s cannot be read", filepath.Base(path)).At("%s", path).
			Wrap(err).Try("fetch the model's files again")
	}
	return object, nil
}

// parse reads the templates: of several, the one that is called default, and tool_use for tools.
func (t *Template) parse(named map[string]string) error {
	h := sha256.New()
	for _, one := range []struct {
		name string
		to   **jinja.Template
	}{{"default", &t.plain}, {"tool_use", &t.tools}} {
		text, ok := named[one.name]
		if !ok {
			continue
		}
		fmt.Fprintf(h, "%s %d %s\n", one.name, len(text), text)
		var err error
		if *one.to, err = jinja.Parse(text); err != nil {
			e := diag.From(err)
			return e.At("%s: %s", t.Path, e.Where).
				Try("name a built-in template in data.sources: template = \"chatml\"")
		}
	}
	for _, name := range slices.Sorted(maps.Keys(t.tokens)) {
		fmt.Fprintf(h, "%s %q\n", name, t.tokens[name])
	}
	t.Digest = fmt.Sprintf("%x", h.Sum(nil))
	if t.plain == nil {
		return diag.New(diag.DataTemplate, "none of the chat templates is called default").
			At("%s", t.Path).Try("name a built-in template in data.sources: template = \"chatml\"")
	}
	return nil
}

// Marks reports whether the template marks what is learned; if not, it is found by prefixes.
func (t *Template) Marks() bool { return t.plain.Marks() }

// today is the date that templates are given: Llama's own default. The same data must give the same
// tokens on another day.
var today = time.Date(2024, 7, 26, 0, 0, 0, 0, time.UTC)

// A Rendering is a chat as its template writes it.
type Rendering struct {
	Text string
	// Learned are the parts to learn: where each begins and ends in Text.
	Learned [][2]int
	// Plain are parts of Text that spell a special token, and are text that somebody wrote.
	Plain [][2]int
}

// guard is put into the names of special tokens that stand in messages, and taken out of the text
// that a template made of them: the template's own tokens are known by that. It is no character.
const guard = "\U0010ffff"

// Render writes a chat. find gives the places of special tokens in a text.
func (t *Template) Render(d Document, find func(string) ([][2]int, error)) (Rendering, error) {
	c := &conversation{Template: t, jinja: t.plain, learned: d.Chat}
	g := &guarding{find: find}
	for i, m := range d.Chat {
		v := any(jinja.NewDict("role", m.Role, "content", m.Content))
		if m.Raw != nil {
			var err error
			if v, err = jinja.Decode(m.Raw); err != nil {
				return Rendering{}, diag.New(diag.DataFormat, "message %d cannot be read: %v", i+1, err)
			}
		}
		v, err := jinja.MapStrings(v, g.guard)
		if err != nil {
			return Rendering{}, err
		}
		c.messages = append(c.messages, v)
	}
	if d.Tools != nil {
		if t.tools != nil {
			c.jinja = t.tools
		}
		tools, err := decodeTools(d.Tools)
		if err == nil {
			c.tools, err = jinja.MapStrings(tools, g.guard)
		}
		if err != nil {
			return Rendering{}, err
		}
	}
	r, err := c.render()
	if err != nil {
		return r, err
	}
	return r, g.remove(&r)
}

// decodeTools reads a list of tools, which may be written as a string.
func decodeTools(raw json.RawMessage) (any, error) {
	var text string
	if json.Unmarshal(raw, &text) == nil {
		raw = json.RawMessage(text)
	}
	v, err := jinja.Decode(raw)
	if _, ok := v.([]any); err != nil || !ok {
		return nil, diag.New(diag.DataFormat, "the tools are not a list").
			Try(`write "tools": [{"type": "function", "function": {…}}]`)
	}
	return v, nil
}

// A guarding marks special tokens in what people wrote.
type guarding struct {
	find func(string) ([][2]int, error)
	any  bool
}

func (g *guarding) guard(s string) (string, error) {
	if strings.Contains(s, guard) {
		return "", diag.New(diag.DataFormat, "a message has U+10FFFF, which is no character").
			Try("remove it")
	}
	places, err := g.find(s)
	if err != nil || len(places) == 0 {
		return s, err
	}
	g.any = true
	var b strings.Builder
	at := 0
	for _, p := range places {
		b.WriteString(s[at:p[0]] + guard)
		at = p[0]
	}
	return b.String() + s[at:], nil
}

// remove takes the guards out again, and notes where plain text spells a token.
func (g *guarding) remove(r *Rendering) error {
	if !g.any {
		return nil
	}
	if strings.Contains(r.Text, `\udbff\udfff`) {
		return diag.New(diag.DataFormat, "a message has the name of a special token, which the template "+
			"writes in ASCII").Try("remove the token's name from the message")
	}
	move := func(at int) int { return at - len(guard)*strings.Count(r.Text[:at], guard) }
	for i, p := range r.Learned {
		r.Learned[i] = [2]int{move(p[0]), move(p[1])}
	}
	var b strings.Builder
	for i, part := range strings.Split(r.Text, guard) {
		if i > 0 { // a token that begins at this very place is one that somebody wrote
			r.Plain = append(r.Plain, [2]int{b.Len(), b.Len() + 1})
		}
		b.WriteString(part)
	}
	r.Text = b.String()
	return nil
}

// A conversation is a chat on its way through a template.
type conversation struct {
	*Template
	jinja    *jinja.Template
	messages []any
	learned  []Message
	tools    any
}

// run renders the first n messages.
func (c *conversation) run(n int, prompt bool) (jinja.Output, error) {
	vars := map[string]any{"messages": c.messages[:n], "tools": c.tools, "documents": nil,
		"add_generation_prompt": prompt}
	maps.Copy(vars, c.tokens)
	out, err := c.jinja.Render(vars, today)
	if err != nil {
		e := diag.From(err)
		return out, e.Because("%s: %s", filepath.Base(c.Path), e.Where).
			Try("correct the chat, or name a built-in template in data.sources: template = \"chatml\"")
	}
	return out, nil
}

// render writes the whole chat and finds what is learned.
func (c *conversation) render() (r Rendering, err error) {
	out, err := c.run(len(c.messages), false)
	if err != nil {
		return r, err
	}
	r.Text = out.Text
	if !c.jinja.Marks() {
		r.Learned, err = c.prefixes(out.Text)
		return r, err
	}
	// Of a prompt and its completion, only the completion is learned.
	given := slices.IndexFunc(c.learned, func(m Message) bool { return m.Learned })
	from := 0
	if slices.ContainsFunc(c.learned[:max(given, 0)],
		func(m Message) bool { return m.Role == assistant }) {
		before, err := c.run(given, true)
		if err != nil {
			return r, err
		}
		if !strings.HasPrefix(out.Text, before.Text) {
			return r, c.moves(given)
		}
		from = len(before.Text)
	}
	for _, p := range out.Said {
		if p[1] > from && p[0] < p[1] {
			r.Learned = append(r.Learned, [2]int{max(p[0], from), p[1]})
		}
	}
	return r, nil
}

// prefixes finds what is learned by what each message adds: the text up to it is what the model is
// given, with the beginning of an answer; the text with it ends where the answer does.
func (c *conversation) prefixes(whole string) (list [][2]int, err error) {
	for i, m := range c.learned {
		if !m.Learned {
			continue
		}
		before, err := c.run(i, true)
		if err != nil {
			return nil, err
		}
		with, err := c.run(i+1, false)
		if err != nil {
			return nil, err
		}
		if !strings.HasPrefix(with.Text, before.Text) {
			return nil, diag.New(diag.DataTemplate, "what the template writes before message %d is not what"+
				" it gives a model to answer", i+1).
				Because("%s marks no generation, and its prompt is no prefix of the chat",
					filepath.Base(c.Path)).
				Try("use a template with {%% generation %%}, or a built-in one: template = \"chatml\"")
		}
		if !strings.HasPrefix(whole, with.Text) { // some end a chat with a token of its own
			end, _ := c.tokens["eos_token"].(string)
			with.Text = strings.TrimSuffix(with.Text, end)
		}
		if !strings.HasPrefix(whole, with.Text) || len(with.Text) < len(before.Text) {
			return nil, c.moves(i + 1)
		}
		list = append(list, [2]int{len(before.Text), len(with.Text)})
	}
	return list, nil
}

// moves says that a template writes the first n messages otherwise once others follow.
func (c *conversation) moves(n int) error {
	return diag.New(diag.DataTemplate, "the template writes the first %d messages otherwise when "+
		"others follow", n).
		Because("%s marks no generation, so that what is learned cannot be found",
			filepath.Base(c.Path)).
		Try("use a template with {%% generation %%}, end each chat with the answer to learn, or name a " +
			"built-in template: template = \"chatml\"")
}
