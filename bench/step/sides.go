package main

import (
	"context"
	_ "embed"
	"fmt"
	"strings"

	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/abtest"
)

//go:embed jax_side.py
var jaxSide string

//go:embed torch_side.py
var torchSide string

// sides starts everyone who takes part; those that were started are returned with an error, too.
func sides(ctx context.Context, e *engine.Engine, s abtest.Size, w *abtest.Weights, o options) (
	[]*abtest.Row, error) {
	var rows []*abtest.Row
	add := func(name string, make func() (abtest.Side, error)) error {
		x, err := make()
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		rows = append(rows, &abtest.Row{Name: name, Side: x})
		return nil
	}
	err := add("deepwell", func() (abtest.Side, error) { return newTrainer(ctx, e, s, w, o.dump) })
	for also := range strings.SplitSeq(o.also, ",") {
		if name, dir, ok := strings.Cut(also, "="); ok && err == nil {
			err = add(name, func() (abtest.Side, error) { return oldTrainer(ctx, e, s, w, dir) })
		}
	}
	for _, p := range []struct{ name, python, script, mode string }{
		{"jax", o.jax, jaxSide, ""},
		{"torch eager", o.torch, torchSide, "eager"}, {"torch compile", o.torch, torchSide, "compile"},
	} {
		for _, kept := range []bool{false, true} {
			name := p.name
			if kept {
				name += ", memory kept"
			}
			if p.python == "" || err != nil {
				continue
			}
			s.Mode = p.mode
			err = add(name, func() (abtest.Side, error) {
				return abtest.Start(p.python, p.script, s, w, kept)
			})
		}
	}
	return rows, err
}
