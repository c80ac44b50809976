package data

import (
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/chat"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/tokenizer"
)

// A template says how a chat is written as tokens. Names in angle brackets are tokens of the
// vocabulary; what stands between them is text.
type template struct {
	open   string            // before all messages
	before string            // before the content of a message; {role} is its role
	after  string            // behind the content: the first token ends the turn, and is learned
	trim   bool              // blanks around the content are dropped
	rename map[string]string // roles that the model knows by another name
}

// templates are the ones that most models are tuned with: ChatML, as in Qwen, and Llama 3's.
// They write the messages and nothing else: no system prompt and no date that the file does not
// have. plain is for a tokenizer that has no tokens for turns.
var templates = map[string]template{
	"chatml": {before: "<|im_start|>{role}\n", after: "<|im_end|>\n"},
	"llama3": {open: "<|begin_of_text|>",
		before: "<|start_header_id|>{role}<|end_header_id|>\n\n", after: "<|eot_id|>", trim: true,
		rename: map[string]string{"tool": "ipython"}},
	"plain": {before: "{role}:\n", after: "{end}\n"},
}

// Templates lists the names of the chat templates.
func Templates() []string { return slices.Sorted(maps.Keys(templates)) }

// Builtin asks for a built-in template, the one whose tokens the tokenizer has, although the model
// brings its own.
const Builtin = "builtin"

// A chatter writes chats as tokens. Its template was split once, when it was made.
type chatter struct {
	name   string
	tokens *tokenizer.Tokenizer
	shape  template
	// The template's open and before; after, split behind its first mark, which ends a turn.
	open, before, end, rest []templatePart
}

// A templatePart is a token that a template names, or text between such tokens.
type templatePart struct {
	text string
	id   int32 // -1 for text
}

// newChatter finds the template of a name; without one, the one whose tokens the tokenizer has.
func newChatter(name string, t *tokenizer.Tokenizer, end int32) (*chatter, error) {
	if name == "" {
		name = "plain"
		for _, other := range []string{"chatml", "llama3"} {
			if _, err := newChatter(other, t, end); err == nil {
				name = other
				break
			}
		}
	}
	shape, ok := templates[name]
	if !ok {
		return nil, diag.New(diag.BadInput, "there is no template %q", name).
			Meant(name, Templates(), "did you mean %s?",
				"choose one of "+strings.Join(append(Templates(), Builtin), ", "))
	}
	c := &chatter{name: name, tokens: t, shape: shape}
	for _, one := range []struct {
		text  string
		parts *[]templatePart
	}{{shape.open, &c.open}, {shape.before, &c.before}, {shape.after, &c.rest}} {
		for _, part := range split(one.text) {
			id, ok := t.ID(part)
			switch {
			case part == "{end}":
				id = end
			case !marks.MatchString(part):
				id = -1
			case !ok:
				return nil, diag.New(diag.DataTokenizer, "the tokenizer has no token %q, which the "+
					"template %s needs", part, name).
					Try("use the tokenizer of a chat model, or the template plain")
			}
			*one.parts = append(*one.parts, templatePart{part, id})
		}
	}
	c.end, c.rest = c.rest[:1], c.rest[1:]
	return c, nil
}

// marks are the tokens that a template names.
var marks = regexp.MustCompile(`\{end\}|<\|.*?\|>`)

// split separates a template's text into marks and the text between them.
func split(text string) (list []string) {
	at := 0
	for _, mark := range marks.FindAllStringIndex(text, -1) {
		if at < mark[0] {
			list = append(list, text[at:mark[0]])
		}
		list = append(list, text[mark[0]:mark[1]])
		at = mark[1]
	}
	if at < len(text) {
		list = append(list, text[at:])
	}
	return list
}

// append writes a chat behind ids. learned has a flag for each of them: set for what an assistant
// says and the token that ends its turn.
//
// What stands before an assistant's words is encoded apart from them, because that is what the
// model is given when it is asked for them.
func (c *chatter) append(ids []int32, learned []bool,
	messages []chat.Message) ([]int32, []bool) {
	o := tokenizer.Options{NoTemplate: true, Literal: true}
	put := func(learn bool) {
		for len(learned) < len(ids) {
			learned = append(learned, learn)
		}
	}
	text := "" // waits to be encoded at once
	flush := func() {
		if text != "" {
			ids = c.tokens.Append(ids, text, o)
			text = ""
		}
	}
	write := func(parts []templatePart, role string) {
		for _, part := range parts {
			if part.id < 0 {
				text += strings.ReplaceAll(part.text, "{role}", role)
				continue
			}
			flush()
			ids = append(ids, part.id)
		}
	}
	write(c.open, "")
	for _, m := range messages {
		role := m.Role
		if other, ok := c.shape.rename[role]; ok {
			role = other
		}
		if c.shape.trim {
			m.Content = strings.TrimSpace(m.Content)
		}
		write(c.before, role)
		if m.Role != "assistant" || !m.Learned {
			text += m.Content
			write(c.end, role)
			write(c.rest, role)
			continue
		}
		flush()
		put(false)
		text = m.Content
		write(c.end, role)
		put(true)
		write(c.rest, role)
	}
	flush()
	put(false)
	return ids, learned
}

// check refuses a chat with what a built-in template has no words for.
func (c *chatter) check(it *item) error {
	for i, m := range it.chat {
		if m.Calls {
			return diag.New(diag.DataFormat, "message %d calls a tool, which the built-in chat templates "+
				"cannot write", i+1).At("%s", it.where).
				Try("use the tokenizer folder of a model whose chat template has tools")
		}
	}
	if it.tools != nil {
		return diag.New(diag.DataFormat, "the row has tools, which the built-in chat templates cannot "+
			"write").At("%s", it.where).Try("use the tokenizer folder of a model " +
			"whose chat template has tools")
	}
	return nil
}

// converse writes a chat with the model's own template. Its text is encoded at once, as
// transformers does it, and a token is learned if a part of it is.
func (b *builder) converse(c *chunk, it *item) error {
	r, err := b.model.Render(chat.Document{Chat: it.chat, Tools: it.tools}, b.tokens.Marks)
	if err != nil {
		return err
	}
	o := tokenizer.Options{NoTemplate: true, Plain: r.Plain}
	from := len(c.tokens)
	c.tokens = b.tokens.Append(c.tokens, r.Text, o)
	places, ok := b.tokens.Offsets(c.tokens[from:], r.Text)
	if !ok {
		c.tokens = c.tokens[:from]
		b.apart(c, r)
		return nil
	}
	places = append(places, len(r.Text))
	for i, begin := range places[:len(places)-1] {
		learn := slices.ContainsFunc(r.Learned, func(p [2]int) bool {
			return begin < p[1] && (places[i+1] > p[0] || begin >= p[0])
		})
		c.learned = append(c.learned, learn)
	}
	return nil
}

// apart encodes what is given and what is learned by themselves, where tokens cannot be found in
// the text: a tokenizer that normalizes text spells another one.
func (b *builder) apart(c *chunk, r chat.Rendering) {
	at := 0
	put := func(to int, learn bool) {
		o := tokenizer.Options{NoTemplate: true}
		for _, p := range r.Plain {
			if p[0] >= at && p[0] < to {
				o.Plain = append(o.Plain, [2]int{p[0] - at, p[1] - at})
			}
		}
		c.tokens = b.tokens.Append(c.tokens, r.Text[at:to], o)
		for len(c.learned) < len(c.tokens) {
			c.learned = append(c.learned, learn)
		}
		at = to
	}
	for _, p := range r.Learned {
		put(p[0], false)
		put(p[1], true)
	}
	put(len(r.Text), false)
}
