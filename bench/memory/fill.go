package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"time"

	"github.com/deepwell/deepwell/diag"
)

// fill compiles the combinations whose text matches only, or of these just the table's rows, puts
// them in the place of the table's rows, and saves it after each. Programs that were compiled
// before are in the cache, so that after a change only what changed takes long.
func fill(ctx context.Context, path, cache, only string, rows bool, all []combination) error {
	wanted, err := regexp.Compile(only)
	if err != nil {
		return err
	}
	c, err := newCompiler(cache)
	if err != nil {
		return err
	}
	defer c.close()
	old, err := read(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	known := map[string]*row{}
	for _, r := range old {
		known[r.key] = r
	}
	var failed []error
	for i, one := range all {
		if !wanted.MatchString(one.key()) || rows && known[one.key()] == nil {
			continue
		}
		start := time.Now()
		r, err := c.compile(ctx, one)
		fmt.Fprintf(os.Stderr, "%d %s %.0f s %v\n", i, one.key(), time.Since(start).Seconds(), err)
		if err != nil && !errors.Is(err, diag.TooLarge) {
			if errors.Is(err, diag.EngineMissing) || ctx.Err() != nil {
				return err
			}
			failed = append(failed, fmt.Errorf("%d: %w", i, err)) // a fault of ours; the others go on
			delete(known, one.key())
			continue
		}
		if known[one.key()] = r; err != nil {
			delete(known, one.key()) // XLA would rematerialize on its own: another program
		}
		var list []*row
		for _, c := range all {
			if r := known[c.key()]; r != nil {
				list = append(list, r)
			}
		}
		if err := save(path, list); err != nil {
			return err
		}
	}
	return errors.Join(failed...)
}
