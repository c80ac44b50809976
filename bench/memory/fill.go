package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/deepwell/deepwell/diag"
)

// fill compiles the combinations whose text contains only, and saves the table after each. Programs
// that were compiled before are in the cache, so that after a change only what changed takes long.
func fill(ctx context.Context, path, cache, only string, all []combination) error {
	c, err := newCompiler(cache)
	if err != nil {
		return err
	}
	defer c.close()
	var rows []*row
	for i, one := range all {
		if !strings.Contains(one.key(), only) {
			continue
		}
		start := time.Now()
		r, err := c.compile(ctx, one)
		fmt.Fprintf(os.Stderr, "%d %s %.0f s %v\n", i, one.key(), time.Since(start).Seconds(), err)
		if errors.Is(err, diag.TooLarge) {
			continue // XLA would compute some things again on its own: another program
		}
		if err != nil {
			return err
		}
		rows = append(rows, r)
		if err := save(path, rows); err != nil {
			return err
		}
	}
	return nil
}
