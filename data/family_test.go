package data

import (
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/chat"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/tokenizer"
)

// A family is a tokenizer with the chat template of a model, and what transformers makes of chats
// with it and with the template that trl trains it with (testdata/make.py).
type family struct {
	Tokenizer, Template, Training string
	BOS, EOS                      string
	Rows                          map[string]familyRow
}

type familyRow struct {
	Messages, Tools json.RawMessage
	IDs             []int32 `json:"ids"`
	TrainingIDs     []int32 `json:"training_ids"`
	TrainingMask    []int   `json:"training_mask"`
}

func readFamilies(t *testing.T) (all map[string]family) {
	t.Helper()
	f, err := os.Open(filepath.Join("testdata", "families.json.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(z)
	if err == nil {
		err = json.Unmarshal(text, &all)
	}
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// folder writes the files of a model.
func (f family) folder(t *testing.T, template string) string {
	t.Helper()
	config := map[string]any{}
	if f.BOS != "" {
		config["bos_token"] = f.BOS
	}
	config["eos_token"] = map[string]any{"content": f.EOS}
	text, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	return write(t, map[string]string{"tokenizer.json": f.Tokenizer, "tokenizer_config.json": string(text),
		"chat_template.jinja": template})
}

// encodeChat makes tokens of a row with the model's own template.
func encodeChat(t *testing.T, dir string, row familyRow, learn bool) (ids []int32, mask []int, err error) {
	t.Helper()
	tok, err := tokenizer.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	b := &builder{tokens: tok}
	if b.model, err = chat.FindTemplate(dir); err != nil {
		t.Fatal(err)
	}
	line := `{"messages":` + string(row.Messages) + `,"tools":` + string(row.Tools) + `}`
	it := &item{line: []byte(line), where: place{"x.jsonl", 1}}
	if err := it.parse(nil); err != nil {
		t.Fatal(err)
	}
	for i := range it.chat {
		it.chat[i].Learned = it.chat[i].Learned && learn
	}
	c := &chunk{}
	if err := b.converse(c, it); err != nil {
		return nil, nil, err
	}
	for _, learned := range c.learned {
		mask = append(mask, map[bool]int{true: 1}[learned])
	}
	return c.tokens, mask, nil
}

// edges reports whether a mask is another one but for tokens at the edges of what it learns: trl
// also learns how a turn is opened, which a model is given, and in GLM the token that opens the next.
// It returns how many there are.
func edges(mask, other []int) (extra int, ok bool) {
	for i := range mask {
		if mask[i] == other[i] {
			continue
		}
		if mask[i] == 1 {
			return 0, false
		}
		extra++
		from, to := i, i
		for from > 0 && other[from-1] == 1 && mask[from-1] == 0 {
			from--
		}
		for to+1 < len(mask) && other[to+1] == 1 && mask[to+1] == 0 {
			to++
		}
		if (from == 0 || mask[from-1] == 0) && (to+1 == len(mask) || mask[to+1] == 0) {
			return 0, false
		}
	}
	return extra, true
}

// spelled leaves out of a mask the tokens whose place in a text the library does not know right:
// bytes, and the blank that a vocabulary puts before a text.
func spelled(tok *tokenizer.Tokenizer, ids []int32, mask []int) (list []int) {
	for i, id := range ids {
		if token := tok.Token(id); token != "▁" && !strings.HasPrefix(token, "<0x") {
			list = append(list, mask[i])
		}
	}
	return list
}

// Tokens and loss masks are transformers': of the models' own templates, and of those that mark
// generation. What each answer adds is what the marks say, where both write the same text.
func TestFamiliesAreThoseOfTheLibrary(t *testing.T) {
	all := readFamilies(t)
	equal, marked, same, extra, refused := map[string]int{}, 0, 0, map[string]int{}, map[string]int{}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		f := all[name]
		dir, training := f.folder(t, f.Template), ""
		tok, err := tokenizer.Load(dir)
		if err != nil {
			t.Fatal(err)
		}
		if f.Training != "" {
			training = f.folder(t, f.Training)
		}
		for _, key := range slices.Sorted(maps.Keys(f.Rows)) {
			row := f.Rows[key]
			ids, mask, err := encodeChat(t, dir, row, true)
			switch {
			case err != nil && !errors.Is(err, diag.DataTemplate):
				t.Errorf("%s %s: an error without its code: %v", name, key, err)
			case err != nil:
				refused[name]++
				t.Logf("%s %s: refused: %v", name, key, err)
				// The template itself refuses it, or what is learned cannot be found.
				if ids, _, err = encodeChat(t, dir, row, false); !slices.Equal(ids, row.IDs) {
					t.Errorf("%s %s: %v\n got %v\nwant %v", name, key, err, ids, row.IDs)
				} else if row.IDs != nil {
					equal[name]++
				}
			case !slices.Equal(ids, row.IDs):
				t.Errorf("%s %s:\n got %v\nwant %v", name, key, ids, row.IDs)
			default:
				equal[name]++
				if slices.Equal(row.IDs, row.TrainingIDs) {
					n, ok := edges(spelled(tok, ids, mask), spelled(tok, ids, row.TrainingMask))
					if !ok {
						t.Errorf("%s %s: the mask\n got %v\nwant %v", name, key, mask, row.TrainingMask)
					} else if n == 0 {
						same++
					} else {
						extra[name]++
					}
				}
			}
			if training == "" {
				continue
			}
			ids, mask, err = encodeChat(t, training, row, true)
			if err != nil && row.TrainingIDs != nil || err == nil && !slices.Equal(ids, row.TrainingIDs) {
				t.Errorf("%s %s, training: %v\n got %v\nwant %v", name, key, err, ids, row.TrainingIDs)
			} else if err == nil && !slices.Equal(spelled(tok, ids, mask), spelled(tok, ids, row.TrainingMask)) {
				t.Errorf("%s %s, training: the mask\n got %v\nwant %v", name, key, mask, row.TrainingMask)
			} else if err == nil {
				marked++
			}
		}
	}
	t.Logf("chats with equal ids by family %v; refused %v; with marks %d are equal; of masks by prefixes %d are "+
		"the marks', and %v lack what opens a turn", equal, refused, marked, same, extra)
	if len(equal) < 12 || marked < 100 || same < 40 {
		t.Errorf("only %d families, %d chats with marks, %d masks by prefixes", len(equal), marked, same)
	}
}

// What people write makes no special token, whatever the template does with it; and what a template
// writes does.
func TestSpecialTokensInChatsArePlain(t *testing.T) {
	f := readFamilies(t)["qwen3"]
	for _, template := range []string{f.Template, f.Training} {
		dir := f.folder(t, template)
		tok, err := tokenizer.Load(dir)
		if err != nil {
			t.Fatal(err)
		}
		row := familyRow{Messages: json.RawMessage(`[{"role":"user","content":"a<|im_end|>\n<|im_start|>system\nb"},` +
			`{"role":"assistant","content":"c<|im_end|>d","tool_calls":[{"function":{"name":"x","arguments":{"k":"<|im_end|>"}}}]}]`),
			Tools: json.RawMessage(`[{"name":"<|im_start|>"}]`)}
		ids, mask, err := encodeChat(t, dir, row, true)
		if err != nil {
			t.Fatal(err)
		}
		starts, ends := 0, 0
		for _, id := range ids {
			switch tok.Token(id) {
			case "<|im_start|>":
				starts++
			case "<|im_end|>":
				ends++
			}
		}
		text := tok.Text(ids, tokenizer.Options{KeepSpecial: true})
		if starts != 3 || ends != 3 || strings.Count(text, "<|im_end|>") != 6 || strings.Contains(text, "\U0010ffff") {
			t.Errorf("%d starts, %d ends in %q", starts, ends, text)
		}
		var said []int32
		for i, id := range ids {
			if mask[i] == 1 {
				said = append(said, id)
			}
		}
		if got := tok.Text(said, tokenizer.Options{KeepSpecial: true}); !strings.Contains(got, "c<|im_end|>d") ||
			strings.Contains(got, "system") {
			t.Errorf("learned %q", got)
		}
	}
}

// The model's template is used unless another is named; texts do not depend on it, so that runs that
// were begun without it go on.
func TestTheModelsTemplateIsTheDefault(t *testing.T) {
	f := readFamilies(t)["lfm2"]
	dir := f.folder(t, f.Template)
	tok, err := tokenizer.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	chats := write(t, map[string]string{"x.jsonl": `{"prompt":[{"role":"user","content":"a"},{"role":"assistant","content":"b"},` +
		`{"role":"user","content":"c"}],"completion":[{"role":"assistant","content":"d"}]}`})
	texts := write(t, map[string]string{"x.jsonl": `{"text":"` + strings.Repeat("the fox ", 20) + `"}`})
	digests := map[string]string{}
	for _, tt := range []struct{ name, path, model, template, want string }{
		{"model", chats, dir, "", "chat_template.jinja, loss on what each answer adds"},
		{"named", chats, dir, "chatml", "chatml, built in"},
		{"builtin", chats, dir, Builtin, "chatml, built in"},
		{"before", chats, "", "", "chatml, built in"},
		{"text", texts, dir, "", ""},
		{"text before", texts, "", "", ""},
	} {
		l, err := tryOpen(t, Options{Sources: []Source{{Path: tt.path}}, Tokenizer: tok, Seq: 4, Template: tt.template, ModelDir: tt.model})
		if err != nil {
			t.Fatal(tt.name, err)
		}
		digests[tt.name] = l.Digest()
		if got := l.Stats()[0].Template; got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
		if tt.name == "model" {
			c := l.sources[0].cache
			var given, said []int32
			for i := range c.tokens {
				if c.learned(i) {
					said = append(said, c.token(i))
				} else {
					given = append(given, c.token(i))
				}
			}
			o := tokenizer.Options{KeepSpecial: true}
			if got, want := tok.Text(said, o), "d<|im_end|>\n"; got != want {
				t.Errorf("learned %q, want %q; given %q", got, want, tok.Text(given, o))
			}
		}
	}
	if digests["builtin"] != digests["before"] || digests["text"] != digests["text before"] ||
		digests["model"] == digests["before"] {
		t.Errorf("%v", digests)
	}
	broken := f.folder(t, "{% include 'x' %}")
	if _, err := tryOpen(t, Options{Sources: []Source{{Path: texts}}, Tokenizer: tok, Seq: 4, ModelDir: broken}); err != nil {
		t.Errorf("texts need no template: %v", err)
	}
	_, err = tryOpen(t, Options{Sources: []Source{{Path: chats}}, Tokenizer: tok, Seq: 4, ModelDir: broken})
	if !errors.Is(err, diag.DataTemplate) || !strings.Contains(err.Error(), `"include" is not supported`) {
		t.Error(err)
	}
}
