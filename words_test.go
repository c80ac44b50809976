package deepwell

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/scanner"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// retiredNames are words that identifiers do not use, and the field's words for them. A reader who
// comes from Megatron, torchtitan or XLA greps for the latter.
var retiredNames = map[string]string{
	"appraise": "load prices", "calm": "low bubble", "calmer": "low bubble", "card": "GPU",
	"cards": "GPUs", "crew": "executor", "doubt": "log sigma", "few": "quantized",
	"handover": "reference run, stage transfer", "lodge": "place", "micro": "microbatch",
	"mishap": "scenario", "mishaps": "scenarios", "narrow": "quantized", "piece": "slice, shard, chunk",
	"pieces": "slices, shards, chunks", "products": "GEMMs", "rehearsal": "dry run",
	"rehouse": "reshard", "repair": "final BF16", "restless": "high bubble",
	"sentry": "precisionController", "stock": "bytes of quantized weights", "teller": "stats",
	"told": "recorded", "turned": "transposed",
}

// retiredProse are phrases that comments, messages, help and documents do not use.
var retiredProse = []struct{ phrase, use string }{
	{`few bits`, "low precision, quantized"},
	{`narrow(er)?`, "quantized, low precision"},
	{`in blocks`, "quantized, block-scaled"},
	{`no numbers?`, "NaN, not finite"},
	{`(is|are) none`, "NaN; zero means none"},
	{`(compute[sd]?|computing) again`, "recompute"},
	{`that of|those of`, "the noun itself"},
	{`cards?`, "GPU"},
	{`turned`, "transposed"},
	{`told`, "recorded, reported, inferred"},
	{`pieces?`, "slice, shard, chunk"},
	{`cuts?`, "shard, split, slice, truncate"},
	{`products (of|in)`, "GEMMs"},
	{`so many`, "the number"},
	{`as often`, "as many times"},
	{`calm(er)?`, "low bubble"},
	{`restless`, "high bubble"},
	{`doubts?`, "log sigma"},
	{`handed|handover|hand over`, "stage transfer, reference run, wgrad inputs"},
	{`rehearsals?`, "dry run"},
	{`mishaps?`, "scenario"},
	{`sentry`, "precision controller"},
	{`crews?`, "executor"},
	{`as (it|they) lies?`, "in its layout"},
	{`the watch`, "the monitor"},
	{`micro`, "microbatch"},
	{`repairs?`, "final BF16 phase"},
}

// allowed are uses of a retired word in its other meaning, by path prefix.
var allowed = []struct{ path, word, why string }{
	{"tokenizer/", "piece", "SentencePiece's word for an entry of its vocabulary"},
	{"data/", "piece", "calls of tokenizer.PieceEnd"},
	{"recipe/", "micro", "the old key, which an error and stored recipes name"},
	{"autoplan/job.go", "micro", "the old key, which an error names"},
	{"autoplan/search_test.go", "micro", "the old key"},
	{"plan/parse.go", "micro", "the value in plans of 3c16e73"},
	{"cmd/deepwell/root.go", "handover", "the old flag, which an error names"},
	{"cmd/deepwell/testdata/script/train.txtar", "handover", "the old flag"},
	{"cmd/deepwell/testdata/script/plan.txtar", "micro", "the old key"},
	{"cmd/deepwell/testdata/script/capture.txtar", "cut", "the contents of a file"},
	{"machine/gpu.go", "card", "the key in machine.json"},
	{"autoplan/calibrate", "card", "the key in calibration.json"},
	{"precision/monitor/state.go", "doubt", "the key in checkpoints"},
	{"capture/aten/", "narrow", "the name of an operator of ATen"},
	{"precision/", "narrow", "a reason that is hashed into a run's identity"},
	{"precision/", "products", "a reason that is hashed into a run's identity"},
	{"cmd/deepwell/testdata/script/policy.txtar", "products", "the same reason, printed"},
	{"words_test.go", "", "the list itself"},
}

// notProse is removed before phrases are sought: code, links, the loss of power, and Megatron's flag.
var notProse = regexp.MustCompile("`[^`]*`|https?://\\S+|power cuts?|micro-batch-size")

// nameParts splits an identifier into its words.
var nameParts = regexp.MustCompile(`[A-Z]?[a-z0-9]+|[A-Z]+`)

// Identifiers, comments, messages, help and documents use the field's words (CONTRIBUTING.md). Evidence of past runs in docs/results is left as it was printed.
func TestTheFieldsWords(t *testing.T) {
	var rules []*regexp.Regexp
	for _, r := range retiredProse {
		rules = append(rules, regexp.MustCompile(`(?i)\b(`+r.phrase+`)\b`))
	}
	object := func(path string, line int, what, word, use string) {
		for _, a := range allowed {
			if strings.HasPrefix(path, a.path) && strings.HasPrefix(strings.ToLower(word), a.word) {
				return
			}
		}
		t.Errorf("%s:%d: %s says %q; use %s", path, line, what, word, use)
	}
	prose := func(path string, line int, text string) {
		text = notProse.ReplaceAllString(text, "")
		for i, re := range rules {
			for _, word := range re.FindAllString(text, -1) {
				object(path, line, "the text", word, retiredProse[i].use)
			}
		}
	}
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		path = filepath.ToSlash(path)
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "testdata" && path != "cmd/deepwell/testdata" ||
			strings.HasPrefix(d.Name(), ".") && path != "." && path != ".ci"):
			return filepath.SkipDir
		case d.IsDir():
			return nil
		}
		src, err := os.ReadFile(path)
		switch {
		case err != nil:
			return err
		case strings.HasSuffix(path, ".go"):
			return goWords(path, src, object, prose)
		case isProse(path):
			for i, line := range bytes.Split(src, []byte("\n")) {
				prose(path, i+1, string(line))
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// isProse tells files that people read as they are.
func isProse(path string) bool {
	for _, end := range []string{".md", ".toml", ".txtar", "help.txt", "keys.txt", ".ci/run", ".ci/full"} {
		if strings.HasSuffix(path, end) {
			return true
		}
	}
	return false
}

// goWords checks the identifiers, the comments and the strings of a Go file.
func goWords(path string, src []byte, object func(path string, line int, what, word, use string),
	prose func(path string, line int, text string)) error {
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, path, src, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	seen := map[string]bool{}
	ast.Inspect(f, func(n ast.Node) bool {
		id, ok := n.(*ast.Ident)
		if !ok || seen[id.Name] {
			return true
		}
		seen[id.Name] = true
		for _, word := range nameParts.FindAllString(id.Name, -1) {
			if use := retiredNames[strings.ToLower(word)]; use != "" {
				object(path, fset.Position(id.Pos()).Line, id.Name, word, use)
			}
		}
		return true
	})
	for _, c := range f.Comments { // as one line: phrases go across line ends
		prose(path, fset.Position(c.Pos()).Line, strings.ReplaceAll(c.Text(), "\n", " "))
	}
	var s scanner.Scanner
	s.Init(fset.AddFile(path, -1, len(src)), src, nil, 0)
	for {
		pos, tok, text := s.Scan()
		if tok == token.EOF {
			return nil
		}
		if tok == token.STRING {
			prose(path, fset.Position(pos).Line, text[1:len(text)-1]) // without quotes
		}
	}
}
