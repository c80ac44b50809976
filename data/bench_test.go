package data

import (
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/tokenizer"
)

// goText copies some megabytes of the Go tree's sources, which every developer has.
func goText(b *testing.B, size int64) (dir string) {
	b.Helper()
	dir = b.TempDir()
	root := filepath.Join(runtime.GOROOT(), "src") //nolint:staticcheck // the tree that runs the test
	done := int64(0)
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || done > size || !strings.HasSuffix(path, ".go") || !d.Type().IsRegular() {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		done += int64(len(text))
		rel, _ := filepath.Rel(root, path)
		return os.WriteFile(filepath.Join(dir, strings.ReplaceAll(rel, string(filepath.Separator), "_")), text, 0o644)
	})
	if err != nil {
		b.Fatal(err)
	}
	return dir
}

func goTokenizer(b *testing.B, dir string) *tokenizer.Tokenizer {
	b.Helper()
	texts := func(yield func(string) bool) {
		for text := range Texts(b.Context(), []Source{{Path: dir}}) {
			if !yield(text) {
				return
			}
		}
	}
	file, err := tokenizer.Train(texts, 4096, "<|endoftext|>")
	if err != nil {
		b.Fatal(err)
	}
	tok, err := tokenizer.Parse(file)
	if err != nil {
		b.Fatal(err)
	}
	return tok
}

// BenchmarkOpen reads 10 MB of Go sources: first without a cache, then from it.
func BenchmarkOpen(b *testing.B) {
	dir := goText(b, 10<<20)
	o := Options{Sources: []Source{{Path: dir}}, Tokenizer: goTokenizer(b, dir), Seq: 1024}
	run := func(b *testing.B) {
		tokens := int64(0)
		for b.Loop() {
			l, err := Open(b.Context(), o)
			if err != nil {
				b.Fatal(err)
			}
			tokens += l.Tokens()
			b.SetBytes(l.Stats()[0].Bytes)
			l.Close()
		}
		b.ReportMetric(float64(tokens)/b.Elapsed().Seconds(), "tokens/s")
	}
	b.Run("build", run)
	o.Cache = b.TempDir()
	b.Run("cached", run)
}

func BenchmarkTake(b *testing.B) {
	dir := goText(b, 10<<20)
	l := open(b, Options{Sources: []Source{{Path: dir}}, Tokenizer: goTokenizer(b, dir), Seq: 1024, Shuffle: true})
	at := Position(nil)
	b.ReportAllocs()
	tokens := 0
	for b.Loop() {
		batch, after, err := l.Take(b.Context(), at, 64, 0, 1)
		if err != nil {
			b.Fatal(err)
		}
		at = after
		tokens += len(batch.IDs)
	}
	b.ReportMetric(float64(tokens)/b.Elapsed().Seconds(), "tokens/s")
}
