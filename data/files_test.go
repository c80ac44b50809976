package data

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/deepwell/deepwell/event"
)

func TestPathsAreExpanded(t *testing.T) {
	dir := write(t, map[string]string{
		"b.txt": "b", "a.txt": "a", ".hidden": "h", ".git/config": "g", "sub/c.go": "c", "sub/deep/d.go": "d",
		"sub/e.md": "e", "x[1].txt": "x", "corpus.bin": "", "corpus.idx": "", "lone.bin": "", "rows.jsonl.zst": "",
	})
	if err := os.Symlink(dir, filepath.Join(dir, "sub", "loop")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(dir, "nowhere"), filepath.Join(dir, "dead")); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		path string
		want string
	}{
		{".", "a.txt b.txt corpus.bin rows.jsonl.zst sub/c.go sub/deep/d.go sub/e.md x[1].txt"},
		{"a.txt", "a.txt"},
		{"x[1].txt", "x[1].txt"},
		{"*.txt", "a.txt b.txt x[1].txt"},
		{"**/*.go", "sub/c.go sub/deep/d.go"},
		{"sub/**", "c.go deep/d.go e.md"},
		{"sub/**/d.go", "deep/d.go"},
		{"s*/*.go", "sub/c.go"},
		{".git/*", "config"},
		{"**/.hidden", ".hidden"},
		{"?.txt", "a.txt b.txt"},
		{"corpus", "corpus.bin"},
		{"corpus.bin", "corpus.bin"},
		{"corpus.idx", "corpus.bin"},
		{"corpus.*", "corpus.bin"},
	} {
		list, _, err := Source{Path: filepath.Join(dir, tt.path)}.files()
		if err != nil {
			t.Errorf("%s: %v", tt.path, err)
			continue
		}
		var names []string
		for _, f := range list {
			names = append(names, f.name)
		}
		// Names are relative to the part of the path that is fixed.
		if got := strings.Join(names, " "); got != tt.want {
			t.Errorf("%s gives %s, want %s", tt.path, got, tt.want)
		}
	}
	_, skipped, err := Source{Path: dir}.files()
	if err != nil || skipped != 2 { // lone.bin and the link that leads nowhere
		t.Errorf("%d files skipped, %v", skipped, err)
	}
}

func TestFormatsByName(t *testing.T) {
	for name, want := range map[string]Format{
		"a.jsonl": JSONL, "a.jsonl.zst": JSONL, "a.JSONL.gz": JSONL, "a.ndjson": JSONL, "a.parquet": Parquet,
		"a.bin": Megatron, "a.txt": Text, "a": Text, "a.txt.gz": Text, "a.json": Text,
	} {
		if got := formatOf(name); got != want {
			t.Errorf("%s is %s, want %s", name, got, want)
		}
	}
}

func TestFilesThatAreNotTextAreCounted(t *testing.T) {
	dir := write(t, map[string]string{"a.txt": strings.Repeat("the fox ", 30), "b.png": "\x89PNG\x00", "c.txt": "caf\xe9", "d.txt": "the dog"})
	r := &event.Recorder{}
	l := open(t, Options{Sources: []Source{{Path: dir}}, Events: r, Cache: t.TempDir()})
	st := l.Stats()[0]
	if diff := cmp.Diff(Stats{Name: "data", Files: 4, Skipped: 2, Documents: 2, Bytes: 247, Tokens: st.Tokens,
		Sequences: (st.Tokens - 1) / 16, Kinds: []string{"text"},
		Passed: []string{"b.png: byte 0x89 in line 1, at offset 0 is not UTF-8", "c.txt: byte 0xE9 in line 1, at offset 3 is not UTF-8"}}, st); diff != "" {
		t.Error(diff)
	}
	if want := "data: 2 of 4 files are not text and were passed over"; !strings.Contains(lines(r), want) {
		t.Errorf("reported %q", lines(r))
	}
}

func TestFileThatChangesIsNoticed(t *testing.T) {
	dir := write(t, map[string]string{"a.txt": "the fox"})
	list, _, err := Source{Path: dir}.files()
	if err != nil {
		t.Fatal(err)
	}
	if err := unchanged(list); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(list[0].path, []byte("the foxes"), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := unchanged(list); err == nil {
		t.Error("a file that grew is not noticed")
	}
	if err := os.Remove(list[0].path); err != nil {
		t.Fatal(err)
	}
	if err := unchanged(list); err == nil {
		t.Error("a file that went away is not noticed")
	}
}

func TestTexts(t *testing.T) {
	dir := write(t, map[string]string{"a.txt": "one", "b.bin2": "\xff", "c.jsonl": "{\"text\":\"two\"}\n" +
		`{"messages":[{"role":"user","content":"three"},{"role":"assistant","content":"four"}]}`})
	var got []string
	for text, err := range Texts(t.Context(), []Source{{Path: dir}}) {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, text)
	}
	if want := []string{"one", "two", "three", "four"}; !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
	for range Texts(t.Context(), []Source{{Path: dir}}) {
		break
	}
	for _, err := range Texts(t.Context(), []Source{{Path: dir + "/nowhere"}}) {
		if err == nil {
			t.Error("text from nowhere")
		}
	}
}
