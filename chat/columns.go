package chat

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
)

// A Kind says what a row is.
type Kind uint8

// The kinds.
const (
	PlainText  Kind = iota // text
	Messages               // messages, each with role and content
	ShareGPT               // conversations, each turn with from and value
	Completion             // prompt and completion: two texts, or two lists of messages
	Alpaca                 // instruction, input and output
)

// order is the one in which a row is taken for a kind: rows that have text beside the columns of
// others were read as text before the others were known.
var order = []Kind{Messages, PlainText, ShareGPT, Completion, Alpaca}

// kinds has the columns of each kind: those that it is known by, and those that it may have.
var kinds = []struct {
	name          string
	known, others []string
}{
	PlainText:  {"text", []string{"text"}, nil},
	Messages:   {"messages", []string{"messages"}, []string{"tools"}},
	ShareGPT:   {"ShareGPT", []string{"conversations"}, []string{"system", "tools"}},
	Completion: {"prompt/completion", []string{"prompt", "completion"}, []string{"tools"}},
	Alpaca: {"Alpaca", []string{"instruction", "output"},
		[]string{"input", "system", "history", "tools"}},
}

// String is the name that people know a kind by.
func (k Kind) String() string { return kinds[k].name }

// Kinds lists the kinds of a set in which bit k stands for kind k.
func Kinds(set uint64) (list []string) {
	for k := range kinds {
		if set>>k&1 == 1 {
			list = append(list, kinds[k].name)
		}
	}
	return list
}

// Columns gives columns that have other names: the key is the one of the kinds' tables, the value
// the name in the file.
type Columns map[string]string

// Roles lists the keys that Columns may have.
func Roles() []string {
	var list []string
	for _, k := range kinds {
		list = append(append(list, k.known...), k.others...)
	}
	slices.Sort(list)
	return slices.Compact(list)
}

// String is how run.toml writes columns, sorted.
func (c Columns) String() string {
	parts := lists.Map(slices.Sorted(maps.Keys(c)), func(role string) string {
		return fmt.Sprintf("%s = %q", role, c[role])
	})
	return "{" + strings.Join(parts, ", ") + "}"
}

// Check refuses names that are not columns of a kind, and columns of two kinds.
func (c Columns) Check() error {
	for role, column := range c {
		if !slices.Contains(Roles(), role) {
			return diag.New(diag.BadInput, "no kind of row has a column %q", role).
				Meant(role, Roles(), "did you mean %q?", "choose from "+strings.Join(Roles(), ", "))
		}
		if column == "" {
			return diag.New(diag.BadInput, "the name of column %q is empty", role)
		}
	}
	var named []Kind
	for k := range kinds {
		if c.names(Kind(k)) {
			named = append(named, Kind(k))
		}
	}
	if len(named) > 1 {
		return diag.New(diag.BadInput, "the columns are of two kinds, %s and %s", named[0], named[1]).
			Try("name the columns of one")
	}
	return nil
}

// names reports whether columns name one that a kind is known by.
func (c Columns) names(k Kind) bool {
	return slices.ContainsFunc(kinds[k].known, func(role string) bool { return c[role] != "" })
}

// name gives the name of a column in the file.
func (c Columns) name(role string) string {
	if name, ok := c[role]; ok {
		return name
	}
	return role
}

// Of tells the kind of rows that have columns, as has reports them. Columns that were named decide.
func (c Columns) Of(has func(name string) bool, names []string) (Kind, error) {
	for k := range kinds {
		if !c.names(Kind(k)) {
			continue
		}
		for _, role := range kinds[k].known {
			if !has(c.name(role)) {
				return 0, c.lacks(Kind(k), role, names)
			}
		}
		return Kind(k), nil
	}
	for _, k := range order {
		if !slices.ContainsFunc(kinds[k].known, func(role string) bool { return !has(role) }) {
			return k, nil
		}
	}
	return 0, unknown(names)
}

// Needs lists the columns that rows of a kind are read from, of those that there are.
func (c Columns) Needs(k Kind, has func(name string) bool) (list []string) {
	for _, role := range slices.Concat(kinds[k].known, kinds[k].others) {
		if name := c.name(role); has(name) {
			list = append(list, name)
		}
	}
	return list
}

// lacks says that a column which was named, or belongs to one, is not there.
func (c Columns) lacks(k Kind, role string, names []string) error {
	e := diag.New(diag.DataFormat, "there is no column %q, the %s of %s", c.name(role), role, k).
		Because("the row has %s", strings.Join(Shown(names), ", "))
	if slices.Contains(names, c.name(role)) {
		e = diag.New(diag.DataFormat, "%q, the %s of %s, is null", c.name(role), role, k)
		return e.Try("remove the row, or fill it in")
	}
	return e.Meant(c.name(role), names, "did you mean columns = {"+role+" = %q}?",
		"name the column: columns = {"+role+` = "…"}`)
}

// preferences are columns of pairs to choose from, which are for another kind of training.
var preferences = []string{"chosen", "rejected"}

// unknown says what is there instead of a kind that is known, and what to do.
func unknown(names []string) error {
	e := diag.New(diag.DataFormat, "the row is of no kind that is known")
	if len(names) == 0 {
		return e.Because("it has no columns").Try(`write {"text": "…"}`)
	}
	e = e.Because("it has %s; known are %s", strings.Join(Shown(names), ", "), known())
	has := func(name string) bool { return slices.Contains(names, name) }
	switch {
	case has(preferences[0]) && has(preferences[1]):
		return e.Try("these are preferences, for DPO; to train on the chosen answers: " +
			`columns = {completion = "chosen"}`)
	case has("question") && has("answer"):
		return e.Try(`name the columns in data.sources: columns = {instruction = "question", ` +
			`output = "answer"} for a chat, or prompt and completion for plain text`)
	case has("conversation"):
		return e.Try(`name the column in data.sources: columns = {messages = "conversation"}`)
	}
	for k := range kinds {
		for _, role := range kinds[k].known {
			if has(role) {
				missing := lists.Filter(kinds[k].known, func(r string) bool { return !has(r) })
				if len(missing) == 0 { // one of them is null
					return diag.New(diag.DataFormat, "%q is not a string or a list", role).
						Try("remove the row, or fill it in")
				}
				return e.Try("name the other column in data.sources: columns = {%s = \"…\"}",
					strings.Join(missing, `, `))
			}
		}
	}
	if len(names) == 1 {
		return e.Try("name the column in data.sources: columns = {text = %q}", names[0])
	}
	if near := diag.Nearest("text", names); near != "" {
		return e.Try("name the column in data.sources: columns = {text = %q}", near)
	}
	return e.Try(`name the columns in data.sources: columns = {text = "…"}, ` +
		`{prompt = "…", completion = "…"} or {instruction = "…", output = "…"}`)
}

// known lists the kinds with their columns.
func known() string {
	var list []string
	for k, kind := range kinds {
		text := Kind(k).String() + " (" + strings.Join(kind.known, ", ") + ")"
		if len(kind.known) == 1 && kind.known[0] == kind.name {
			text = kind.name
		}
		list = append(list, text)
	}
	return strings.Join(list, ", ")
}

// Shown quotes names for a message, and leaves out what would fill the screen.
func Shown(names []string) []string {
	const most, longest = 12, 40
	var out []string
	for i, name := range names {
		if i == most {
			return append(out, fmt.Sprintf("and %d more", len(names)-most))
		}
		if len(name) > longest {
			name = name[:longest] + "…"
		}
		out = append(out, fmt.Sprintf("%q", name))
	}
	return out
}

// A Document is what a row says: a text, or a conversation.
type Document struct {
	Kind Kind
	Text string
	// Prompt is how many bytes at the start of Text are given, and not learned.
	Prompt int
	Chat   []Message
	Tools  json.RawMessage // what the assistant may call, as the row has it; nil without
}

// Read tells what a row is, and reads it.
func (c Columns) Read(r Row) (d Document, err error) {
	if d.Kind, err = c.Of(r.has, r.Names()); err != nil {
		return d, err
	}
	switch d.Kind {
	case PlainText:
		d.Text, err = r.text(c.name("text"))
	case Messages:
		d.Chat, err = r.messages(c.name("messages"))
	case ShareGPT:
		d.Chat, err = c.sharegpt(r)
	case Completion:
		err = c.completion(r, &d)
	case Alpaca:
		d.Chat, err = c.alpaca(r)
	}
	if tools := c.name("tools"); err == nil && d.Chat != nil && r.has(tools) {
		if d.Tools = bytes.TrimSpace(r.raw(tools)); len(d.Tools) == 0 || string(d.Tools) == "[]" {
			d.Tools = nil
		}
	}
	return d, err
}

// sharegpt reads the turns of a conversation; a system prompt may have a column of its own.
func (c Columns) sharegpt(r Row) ([]Message, error) {
	system, err := r.optional(c.name("system"))
	if err != nil {
		return nil, err
	}
	chat, err := r.messages(c.name("conversations"))
	return slices.Concat(said("system", system), chat), err
}

// said is a message if there is something to say.
func said(role, content string) []Message {
	if content == "" {
		return nil
	}
	return []Message{{Role: role, Content: content}}
}

// completion reads a prompt and a completion. Two texts are one text of which the second half is
// learned; of two lists of messages, what an assistant says in the second is.
func (c Columns) completion(r Row, d *Document) (err error) {
	prompt, completion := c.name("prompt"), c.name("completion")
	if r.isList(prompt) != r.isList(completion) {
		return diag.New(diag.DataFormat, "one of %q and %q is text, the other a list of messages", prompt,
			completion).Try("write two texts, or two lists of messages")
	}
	if r.isList(prompt) {
		given, err := r.messages(prompt)
		if err != nil {
			return err
		}
		for i := range given {
			given[i].Learned = false
		}
		answer, err := r.messages(completion)
		d.Chat = append(given, answer...)
		return err
	}
	given, err := r.text(prompt)
	if err != nil {
		return err
	}
	answer, err := r.text(completion)
	d.Text, d.Prompt = given+answer, len(given)
	return err
}

// alpaca makes a conversation of an instruction: the user gives it, with the input below, and the
// assistant answers. History has earlier turns, as pairs.
func (c Columns) alpaca(r Row) ([]Message, error) {
	parts := map[string]string{}
	for _, role := range []string{"system", "instruction", "input", "output"} {
		var err error
		if parts[role], err = r.optional(c.name(role)); err != nil {
			return nil, err
		}
	}
	chat := said("system", parts["system"])
	if name := c.name("history"); r.has(name) {
		var turns [][2]string
		if err := json.Unmarshal(r.raw(name), &turns); err != nil {
			return nil, diag.New(diag.DataFormat, "%q is not a list of pairs of texts", name).
				Try(`write [["question", "answer"], …], or remove the column`)
		}
		for _, turn := range turns {
			chat = append(chat, Message{Role: "user", Content: turn[0]},
				Message{Role: assistant, Content: turn[1], Learned: true})
		}
	}
	ask := parts["instruction"]
	if parts["input"] != "" {
		ask += "\n\n" + parts["input"]
	}
	return append(chat, Message{Role: "user", Content: ask},
		Message{Role: assistant, Content: parts["output"], Learned: true}), nil
}
