package ckpt_test

import (
	"context"
	"fmt"
	"os"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/dtype"
)

func Example() {
	dir, err := os.MkdirTemp("", "ckpt")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	ctx := context.Background()

	// A state of one matrix, 4 by 2, whose bytes count up.
	w := ckpt.Tensor{Name: "w", DType: dtype.U8, Shape: []int64{4, 2}}
	var state ckpt.Memory
	bytes, err := state.Add(w)
	if err != nil {
		panic(err)
	}
	for i := range bytes {
		bytes[i] = byte(i)
	}

	// Two ranks hold two rows each; both write, and one commits.
	draft, err := ckpt.Begin(ctx, dir, 120, ckpt.Options{})
	if err != nil {
		panic(err)
	}
	defer draft.Abort()
	for rank := range 2 {
		rows := ckpt.Box{Start: []int64{int64(2 * rank), 0}, Size: []int64{2, 2}}
		if err := draft.Write(ctx, rank, &state, []ckpt.Slice{{Name: "w", Box: rows}}); err != nil {
			panic(err)
		}
	}
	meta := ckpt.Meta{Data: map[string]int64{"wiki": 4096}}
	if err := draft.Commit(ctx, meta); err != nil {
		panic(err)
	}

	// Another run reads the second column, whoever wrote it.
	c, err := ckpt.Latest(ctx, dir, nil)
	if err != nil {
		panic(err)
	}
	defer c.Close()
	column := make([]byte, 4)
	box := ckpt.Box{Start: []int64{0, 1}, Size: []int64{4, 1}}
	if err := c.ReadSlice("w", box, column); err != nil {
		panic(err)
	}
	fmt.Printf("step %d at %d, column %v\n", c.Step, c.Data["wiki"], column)
	// Output: step 120 at 4096, column [1 3 5 7]
}
