package deepwell

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// retired are words that identifiers do not use, and the field's words for them. A reader who comes
// from Megatron, torchtitan or XLA greps for the latter.
var retired = map[string]string{
	"appraise": "load prices", "calmer": "low bubble", "crew": "executor",
	"handover": "reference run, stage transfer", "lodge": "place", "mishap": "scenario",
	"mishaps": "scenarios", "rehearsal": "dry run", "rehouse": "reshard", "restless": "high bubble",
	"sentry": "precisionController", "stock": "bytes of quantized weights", "teller": "stats",
}

// parts splits an identifier into its words.
var parts = regexp.MustCompile(`[A-Z]?[a-z0-9]+|[A-Z]+`)

// Identifiers use the field's words.
func TestIdentifiersUseTheFieldsWords(t *testing.T) {
	check := func(path string) {
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		seen := map[string]bool{}
		ast.Inspect(f, func(n ast.Node) bool {
			id, ok := n.(*ast.Ident)
			if !ok || seen[id.Name] {
				return true
			}
			seen[id.Name] = true
			for _, word := range parts.FindAllString(id.Name, -1) {
				if now := retired[strings.ToLower(word)]; now != "" {
					t.Errorf("%s: %s says %q; use %s", path, id.Name, word, now)
				}
			}
			return true
		})
	}
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "testdata" || strings.HasPrefix(d.Name(), ".") && path != "."):
			return filepath.SkipDir
		case strings.HasSuffix(path, ".go"):
			check(path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
