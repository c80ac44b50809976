package tokenizer

import (
	"bytes"
	"flag"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// python makes the benchmark run the libraries on the same texts, in the same run:
//
//	go test ./tokenizer -run '^$' -bench Encode -python VENV/bin/python
var python = flag.String("python", "", "a Python with tokenizers and sentencepiece, to compare speed with")

// benchBytes is how much of the Go tree's source is encoded; make.py takes the same.
const benchBytes = 5_000_000

// goSource gives the first n bytes of the Go tree's sources, a text for each file.
func goSource(tb testing.TB, n int) []string {
	tb.Helper()
	root := filepath.Join(runtime.GOROOT(), "src") //nolint:staticcheck // tests run where they were built
	var out []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") {
			return err
		}
		if n == 0 {
			return filepath.SkipAll
		}
		b, err := os.ReadFile(path)
		b = bytes.ToValidUTF8(b[:min(len(b), n)], nil)
		n = max(n-len(b), 0)
		out = append(out, string(b))
		return err
	})
	if err != nil || n > 0 {
		tb.Skipf("the Go tree's sources are not here: %v", err)
	}
	return out
}

// librarySpeed runs a family's library on the same texts and gives its speed in MB/s, on one thread
// and with its faster way to encode; 0 without -python.
func librarySpeed(b *testing.B, name string) float64 {
	if *python == "" {
		return 0
	}
	out, err := exec.Command(*python, "testdata/make.py", "--bench", strconv.Itoa(benchBytes), name).Output()
	if err != nil {
		b.Fatal(err)
	}
	f := strings.Fields(string(out))
	speed, err := strconv.ParseFloat(f[1], 64)
	if err != nil {
		b.Fatal(err)
	}
	return speed
}

func BenchmarkEncode(b *testing.B) {
	source := goSource(b, benchBytes)
	for _, name := range families {
		b.Run(name, func(b *testing.B) {
			tok := load(b, name)
			total := 0
			for _, text := range source {
				total += len(text)
			}
			b.SetBytes(int64(total))
			var ids []int32
			best, tokens := time.Duration(0), 0
			for b.Loop() {
				start := time.Now()
				tokens = 0
				for _, text := range source {
					ids = tok.Append(ids[:0], text, Options{})
					tokens += len(ids)
				}
				if took := time.Since(start); best == 0 || took < best {
					best = took
				}
			}
			b.ReportMetric(float64(tokens)/best.Seconds()/1e6, "Mtok/s")
			if library := librarySpeed(b, name); library > 0 {
				b.ReportMetric(library, "library-MB/s")
				b.ReportMetric(float64(total)/best.Seconds()/1e6/library, "times")
			}
		})
	}
}

func BenchmarkDecode(b *testing.B) {
	source := strings.Join(goSource(b, 1_000_000), "")
	for _, name := range []string{"llama3", "llama2", "spm_unigram"} {
		b.Run(name, func(b *testing.B) {
			tok := load(b, name)
			ids := tok.Encode(source)
			b.SetBytes(int64(len(source)))
			for b.Loop() {
				tok.Decode(ids)
			}
		})
	}
}

func BenchmarkTrain(b *testing.B) {
	source := goSource(b, benchBytes)
	b.SetBytes(benchBytes)
	for b.Loop() {
		if _, err := Train(slices.Values(source), 8192, "<|endoftext|>"); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkLoad(b *testing.B) {
	data, err := Train(slices.Values(goSource(b, benchBytes)), 32000, "<|endoftext|>")
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		if _, err := Parse(data); err != nil {
			b.Fatal(err)
		}
	}
}
