package jinja

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
	"time"

	"github.com/deepwell/deepwell/diag"
)

// now is the time that testdata/make.py gives to templates.
var now = time.Date(2024, 7, 26, 13, 5, 9, 0, time.UTC)

// A rendering is what the library says: a text with its marks, or an error.
type rendering struct {
	Template, Text, Error string
	Said                  [][2]int
}

// fixture is want.json.gz of testdata/make.py.
type fixture struct {
	Chats    map[string]json.RawMessage
	Tools    json.RawMessage
	Special  map[string]string
	Language map[string]rendering
	Models   map[string]map[string]rendering
}

func readGzip(t testing.TB, name string, to any) {
	t.Helper()
	f, err := os.Open(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, to); err != nil {
		t.Fatal(err)
	}
}

// vars are the variables of a chat, as transformers gives them.
func (f *fixture) vars(t testing.TB, chat string, tools, prompt bool) map[string]any {
	t.Helper()
	vars := map[string]any{"add_generation_prompt": prompt, "tools": nil, "documents": nil}
	for name, token := range f.Special {
		vars[name] = token
	}
	var err error
	if vars["messages"], err = Decode(f.Chats[chat]); err != nil {
		t.Fatal(err)
	}
	if tools {
		if vars["tools"], err = Decode(f.Tools); err != nil {
			t.Fatal(err)
		}
	}
	return vars
}

// check compares one rendering, and reports whether it is the library's.
func (w rendering) check(t *testing.T, name, template string, vars map[string]any) bool {
	t.Helper()
	parsed, err := Parse(template)
	var got Output
	if err == nil {
		got, err = parsed.Render(vars, now)
	}
	switch {
	case err != nil && !errors.Is(err, diag.DataTemplate):
		t.Errorf("%s: an error without its code: %v", name, err)
	case w.Error != "" && err == nil:
		t.Errorf("%s: got %.300q, want the error %s", name, got.Text, w.Error)
	case w.Error == "" && err != nil:
		t.Errorf("%s: %v", name, err)
	case got.Text != w.Text:
		i := 0
		for i < len(got.Text) && i < len(w.Text) && got.Text[i] == w.Text[i] {
			i++
		}
		from := max(0, i-60)
		t.Errorf("%s: from byte %d on\n got %.160q\nwant %.160q", name, i, got.Text[from:], w.Text[from:])
	case !slices.Equal(got.Said, w.Said):
		t.Errorf("%s: said %v, want %v", name, got.Said, w.Said)
	default:
		return true
	}
	return false
}

// The language is the library's, where it is known.
func TestLanguage(t *testing.T) {
	var f fixture
	readGzip(t, "want.json.gz", &f)
	if len(f.Language) < 25 {
		t.Fatal(len(f.Language))
	}
	for _, name := range slices.Sorted(maps.Keys(f.Language)) {
		w := f.Language[name]
		w.check(t, name, w.Template, f.vars(t, "turns", false, false))
	}
}

// Every chat is written as transformers writes it, by every template that trl knows; what the
// library refuses is refused.
func TestTemplatesOfModels(t *testing.T) {
	var f fixture
	var templates map[string]string
	readGzip(t, "want.json.gz", &f)
	readGzip(t, "templates.json.gz", &templates)
	whole, renderings, errs := 0, 0, 0
	for _, name := range slices.Sorted(maps.Keys(templates)) {
		same := true
		for _, key := range slices.Sorted(maps.Keys(f.Models[name])) {
			chat, _, _ := strings.Cut(key, "+")
			w := f.Models[name][key]
			vars := f.vars(t, chat, strings.Contains(key, "+tools"), strings.Contains(key, "+prompt"))
			same = w.check(t, name+" "+key, templates[name], vars) && same
			renderings++
			if w.Error != "" {
				errs++
			}
		}
		if same {
			whole++
		}
	}
	t.Logf("%d of %d templates write all chats alike: %d renderings, %d of them refused by both", whole,
		len(templates), renderings, errs)
	if whole != 72 || renderings != 1728 {
		t.Errorf("%d templates, %d renderings", whole, renderings)
	}
}
