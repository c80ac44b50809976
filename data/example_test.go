package data_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/tokenizer"
)

// A run takes steps from a position; a run that resumes on two ranks sees the same rows.
func Example() {
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	text := strings.Repeat("the quick brown fox jumps over the lazy dog\n", 20)
	if err := os.WriteFile(filepath.Join(dir, "a.txt"), []byte(text), 0o644); err != nil {
		log.Fatal(err)
	}
	file, err := tokenizer.Train(slices.Values([]string{text}), 280, "<|endoftext|>")
	if err != nil {
		log.Fatal(err)
	}
	tok, err := tokenizer.Parse(file)
	if err != nil {
		log.Fatal(err)
	}
	ctx := context.Background()
	l, err := data.Open(ctx, data.Options{
		Sources: []data.Source{{Path: filepath.Join(dir, "*.txt")}}, Tokenizer: tok, Seq: 8, Shuffle: true,
	})
	if err != nil {
		log.Fatal(err)
	}
	defer l.Close()

	_, at, _ := l.Take(ctx, nil, 4, 0, 1)
	whole, _, _ := l.Take(ctx, at, 4, 0, 1)
	first, _, _ := l.Take(ctx, at, 4, 0, 2)
	second, after, _ := l.Take(ctx, at, 4, 1, 2)
	fmt.Println(at, after)
	fmt.Println(slices.Equal(whole.IDs, slices.Concat(first.IDs, second.IDs)))
	fmt.Printf("%d labels count, %d of them here\n", second.Total, second.Count)
	// Output:
	// map[data:4] map[data:8]
	// true
	// 32 labels count, 16 of them here
}
