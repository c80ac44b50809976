// Command memory holds what estimate says that plans need to what the compiler says: over plans of
// one generator for CPU, B200 and RTX PRO 6000 it prints the error of the peak by target and cause.
// With -compile it compiles them first, which takes hours, and writes the table.
package main

import (
	"cmp"
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
	drawn := flag.Uint64("seed", 0, "seed of the plans that are compiled; 0 is the table's own")
	kinds := flag.Bool("mixed", false, "the table of plans of other kinds instead of the one fitted")
	last := flag.Bool("mended", false, "the table of such plans that were held out before")
	held := flag.Bool("heldout", false, "the table of such plans that nothing was fitted on")
	rows := flag.Bool("rows", false, "compile only the plans that the table has already")
	only := flag.String("only", "", "compile the plans whose text matches this, instead of all")
	flag.Parse()
	s := fitted
	switch {
	case *held:
		s = unseen
	case *last:
		s = mended
	case *kinds:
		s = seen
	}
	ctx := context.Background()
	if err := run(ctx, s, *dir, *again, *cache, *only, *drawn, *worst, *rows); err != nil {
		fmt.Fprintln(os.Stderr, "memory:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, s sample, dir string, again bool, cache, only string, drawn uint64,
	worst int, rows bool) error {
	path := filepath.Join(dir, s.table)
	if again {
		all, err := s.draw(cmp.Or(drawn, s.seed))
		if err != nil {
			return err
		}
		return fill(ctx, path, cache, only, rows, all)
	}
	list, err := read(path)
	if err != nil {
		return err
	}
	if s.table == fitted.table {
		return report(os.Stdout, list, worst)
	}
	known, err := read(filepath.Join(dir, fitted.table))
	if err != nil {
		return err
	}
	return reportMixed(os.Stdout, list, known)
}
