// Command memory holds what estimate says that plans need to what the compiler says: over plans of
// one generator for CPU, B200 and RTX PRO 6000 it prints the error of the peak by target and cause.
// With -compile it compiles them first, which takes hours, and writes the table.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
)

func main() {
	dir := flag.String("dir", "bench/memory", "folder of the table")
	again := flag.Bool("compile", false, "compile what the table does not have yet")
	cache := flag.String("cache", "", "file that keeps what was compiled")
	worst := flag.Int("worst", 10, "how many of the worst rows to print")
	drawn := flag.Uint64("seed", seed, "seed of the plans that are compiled")
	only := flag.String("only", "", "compile the plans whose text contains this, instead of all")
	flag.Parse()
	if err := run(context.Background(), *dir, *again, *cache, *only, *drawn, *worst); err != nil {
		fmt.Fprintln(os.Stderr, "memory:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, dir string, again bool, cache, only string, drawn uint64,
	worst int) error {
	path := filepath.Join(dir, table)
	if again {
		return fill(ctx, path, cache, only, drawn)
	}
	rows, err := read(path)
	if err != nil {
		return err
	}
	return report(os.Stdout, rows, worst)
}
