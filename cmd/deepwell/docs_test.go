package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/tools/txtar"

	"github.com/deepwell/deepwell/internal/golden"
)

// What pages about plans show is what the commands print, but for the seconds that a search takes
// and the plans that it evaluates, which depend on how its workers take turns; -update writes them
// anew.
func TestPlanningShowsWhatCommandsPrint(t *testing.T) {
	for _, page := range []string{"planning.md", "context.md"} {
		t.Run(page, func(t *testing.T) { showsWhatCommandsPrint(t, page) })
	}
}

func showsWhatCommandsPrint(t *testing.T, page string) {
	path, err := filepath.Abs(filepath.Join("..", "..", "docs", page))
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	script, err := txtar.ParseFile(filepath.Join("testdata", "script", "plan.txtar"))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, f := range script.Files {
		if f.Name == "args.txt" || f.Name == "run/events.jsonl" {
			file := filepath.Join(dir, f.Name)
			if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(file, f.Data, 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	t.Chdir(dir)
	block := regexp.MustCompile("(?ms)^```\n\\$ deepwell (.*?)\n(.*?)^```$")
	taken := regexp.MustCompile(`, [0-9,]+ evaluated, in [0-9.]+ s`)
	shown := block.ReplaceAllFunc(text, func(b []byte) []byte {
		m := block.FindSubmatch(b)
		var out bytes.Buffer
		run(t.Context(), strings.Fields(string(m[1])), &out, &out, os.Getenv)
		got := out.String()
		if taken.ReplaceAllString(got, "") == taken.ReplaceAllString(string(m[2]), "") {
			return b
		}
		if !golden.Update() {
			t.Errorf("deepwell %s prints\n%s\nnot\n%s", m[1], got, m[2])
		}
		return []byte("```\n$ deepwell " + string(m[1]) + "\n" + got + "```")
	})
	if golden.Update() {
		if err := os.WriteFile(path, shown, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
