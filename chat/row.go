package chat

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
)

// A Row is one document as a file has it: JSON values, or what the columns of a table have. A null
// is a column that is not there.
type Row struct {
	JSON map[string]json.RawMessage
	Text map[string]string
	Chat map[string][]Message // lists of messages whose parts are columns of their own
}

// ParseRow reads a JSON object.
func ParseRow(line []byte) (Row, error) {
	if at := invalid(line); at >= 0 {
		return Row{}, diag.New(diag.DataFormat, "the line is not UTF-8: byte %d of it is 0x%02X", at+1,
			line[at]).Try(notUTF8)
	}
	var r Row
	if err := json.Unmarshal(line, &r.JSON); err != nil || r.JSON == nil {
		return r, broken(line, err)
	}
	return r, nil
}

// notUTF8 is the fix for bytes that are not UTF-8.
const notUTF8 = "convert the file: iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW, or correct the byte"

// invalid gives the offset of the first byte that is not UTF-8, or -1.
func invalid(b []byte) int {
	if utf8.Valid(b) {
		return -1
	}
	for i := 0; i < len(b); {
		r, n := utf8.DecodeRune(b[i:])
		if r == utf8.RuneError && n == 1 {
			return i
		}
		i += n
	}
	return -1
}

// broken says what is wrong with a line that is not an object.
func broken(line []byte, err error) error {
	e := diag.New(diag.DataFormat, "the line is not a JSON object")
	if err != nil {
		e = e.Because("%s", strings.TrimPrefix(err.Error(), "json: "))
	}
	if json.Valid(line) {
		return e.Try(`write {"text": "…"} in every line`)
	}
	return e.Try("correct or remove the line; if it is the last one, the file is truncated")
}

// Names lists the columns that a row has, by name.
func (r Row) Names() []string {
	names := slices.Collect(maps.Keys(r.JSON))
	names = slices.AppendSeq(names, maps.Keys(r.Text))
	names = slices.AppendSeq(names, maps.Keys(r.Chat))
	slices.Sort(names)
	return names
}

// Size is about how many bytes a row has.
func (r Row) Size() int {
	n := 0
	for _, raw := range r.JSON {
		n += len(raw)
	}
	for _, text := range r.Text {
		n += len(text)
	}
	for _, chat := range r.Chat {
		n += Spoken(chat)
	}
	return n
}

// has reports whether a column is there and not null.
func (r Row) has(name string) bool {
	if raw, ok := r.JSON[name]; ok {
		return string(raw) != "null"
	}
	_, isText := r.Text[name]
	_, isChat := r.Chat[name]
	return isText || isChat
}

// text gives a column of text.
func (r Row) text(name string) (string, error) {
	if text, ok := r.Text[name]; ok {
		return text, nil
	}
	var text string
	if raw := r.JSON[name]; !r.has(name) || raw == nil || json.Unmarshal(raw, &text) != nil {
		return "", diag.New(diag.DataFormat, "%q is not a string", name).
			Try(`write "%s": "…"`, name)
	}
	return text, nil
}

// optional gives a column of text that may be missing.
func (r Row) optional(name string) (string, error) {
	if !r.has(name) {
		return "", nil
	}
	return r.text(name)
}

// raw gives a column as JSON; a table has it as text.
func (r Row) raw(name string) json.RawMessage {
	if text, ok := r.Text[name]; ok {
		return json.RawMessage(text)
	}
	return r.JSON[name]
}

// isList reports whether a column is a list, of messages that is.
func (r Row) isList(name string) bool {
	_, isChat := r.Chat[name]
	return isChat || bytes.HasPrefix(bytes.TrimSpace(r.JSON[name]), []byte("["))
}

// A Message is one turn of a conversation.
type Message struct {
	Role    string
	Content string // what is said; of several parts, their texts
	Learned bool   // an assistant says it, and training learns it
	Calls   bool   // it has tool calls, which are in Raw
	// Raw is the message as the row has it; nil if it has a role and content only.
	Raw json.RawMessage
}

// Spoken counts the bytes of what messages say.
func Spoken(chat []Message) int {
	return lists.Sum(chat, func(m Message) int { return len(m.Content) })
}

// messages gives a column of messages. An assistant's are learned.
func (r Row) messages(name string) ([]Message, error) {
	if chat, ok := r.Chat[name]; ok {
		for i := range chat {
			chat[i].Learned = chat[i].Role == assistant
		}
		return chat, nil
	}
	chat, err := parseMessages(r.raw(name))
	if e, ok := errors.AsType[*diag.Error](err); ok {
		return nil, e
	}
	if err != nil {
		return nil, diag.New(diag.DataFormat, "the messages cannot be read: %v", err).
			Try(`write {"%s": [{"role": "user", "content": "…"}, …]}`, name)
	}
	return chat, nil
}

const assistant = "assistant"

// parseMessages reads a list of messages. The content of one is a string, or a list of parts of
// which each has text. Parts are read one by one: a short line can have millions of them.
func parseMessages(raw json.RawMessage) ([]Message, error) {
	var chat []Message
	err := eachObject(raw, func(raw json.RawMessage, m map[string]json.RawMessage) error {
		var out Message
		role, content := "role", "content"
		if _, ok := m["from"]; ok && m["role"] == nil {
			role, content = "from", "value"
		}
		if json.Unmarshal(m[role], &out.Role) != nil || out.Role == "" {
			return fmt.Errorf("message %d has no role", len(chat)+1)
		}
		if role == "from" {
			var err error
			if out.Role, err = Role(out.Role); err != nil {
				return err
			}
		} else if len(m) > 2 || len(m[content]) > 0 && m[content][0] == '[' {
			out.Raw = raw
		}
		out.Learned = out.Role == assistant
		calls := m["tool_calls"]
		out.Calls = len(calls) > 0 && string(calls) != "null" && string(calls) != "[]"
		var err error
		if out.Content, err = parseContent(m[content], len(chat)+1, out.Calls); err != nil {
			return err
		}
		chat = append(chat, out)
		return nil
	})
	if errors.Is(err, errNoList) {
		return nil, errors.New("they are not a list of objects")
	}
	if err == nil && len(chat) == 0 {
		err = errors.New("the list is empty")
	}
	return chat, err
}

// parseContent reads what the n-th message says, which may be nothing where it calls a tool.
func parseContent(raw json.RawMessage, n int, calls bool) (string, error) {
	var text string
	if json.Unmarshal(raw, &text) == nil && string(raw) != "null" {
		return text, nil
	}
	var b strings.Builder
	parts := 0
	err := eachObject(raw, func(_ json.RawMessage, p map[string]json.RawMessage) error {
		var text string
		if json.Unmarshal(p["text"], &text) != nil {
			return fmt.Errorf("message %d has a part that is not text", n)
		}
		parts++
		b.WriteString(text)
		return nil
	})
	if errors.Is(err, errNoList) || err == nil && parts == 0 {
		if calls {
			return "", nil
		}
		return "", fmt.Errorf("message %d has no content", n)
	}
	return b.String(), err
}

// speakers are the names of roles in ShareGPT's conversations.
var speakers = map[string]string{
	"human": "user", "user": "user", "gpt": assistant, "chatgpt": assistant, "bing": assistant,
	"bard": assistant, "assistant": assistant, "model": assistant, "system": "system",
	"tool": "tool", "observation": "tool", "function_response": "tool",
}

// Role gives the role of a speaker of ShareGPT's conversations.
func Role(speaker string) (string, error) {
	if role, ok := speakers[speaker]; ok {
		return role, nil
	}
	return "", diag.New(diag.DataFormat, "a message is from %q, which is not a role", speaker).
		Try("write one of %s; or messages with \"role\" and \"content\", whose roles are free",
			strings.Join(slices.Sorted(maps.Keys(speakers)), ", "))
}

// errNoList says that JSON is not a list of objects.
var errNoList = errors.New("not a list of objects")

// eachObject calls take for each object of a list, of which it keeps one at a time.
func eachObject(raw json.RawMessage,
	take func(json.RawMessage, map[string]json.RawMessage) error) error {
	list := json.NewDecoder(bytes.NewReader(raw))
	if start, err := list.Token(); err != nil || start != json.Delim('[') {
		return errNoList
	}
	for list.More() {
		var one json.RawMessage
		var object map[string]json.RawMessage
		if list.Decode(&one) != nil || json.Unmarshal(one, &object) != nil {
			return errNoList
		}
		if err := take(one, object); err != nil {
			return err
		}
	}
	return nil
}
