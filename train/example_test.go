package train_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/train"
)

// evens is a dataset of one sequence, which counts in twos.
type evens struct{}

func (evens) Take(_ context.Context, at data.Position, sequences, _, _ int) (*data.Batch,
	data.Position, error) {
	list := make([][]int32, sequences)
	for i := range list {
		list[i] = []int32{0, 2, 4, 6, 8, 10, 12, 14, 16} // 8 inputs, and the label of the last one
	}
	b, err := data.NewBatch(list)
	return b, at, err
}

// A run described in code: a model, a recipe and a dataset of one's own, trained step by step.
func Example() {
	ctx := context.Background()
	m, err := model.Parse([]byte(`{"model_type": "llama", "vocab_size": 32, "hidden_size": 16,
		"intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_act": "silu",
		"num_key_value_heads": 2, "max_position_embeddings": 8, "rms_norm_eps": 1e-5}`))
	if err != nil {
		log.Fatal(err)
	}
	out, err := os.MkdirTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(out) }()
	r := recipe.Default()
	r.Out, r.Steps, r.Batch, r.Seq, r.Precision = out, 30, 2, 8, dtype.F32
	r.Optimizer.LR, r.Optimizer.Warmup = 1e-2, 2

	e, err := engine.Open(ctx, "cpu", engine.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer e.Close()
	t, err := train.New(ctx, train.Options{Engine: e, Model: m, Recipe: r, Data: evens{}})
	if err != nil {
		log.Fatal(err)
	}
	defer t.Close()
	for {
		s, err := t.Step(ctx)
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			log.Fatal(err)
		}
		if s.Step == 1 || s.Step == r.Steps {
			fmt.Printf("step %d: %d tokens, loss below 1: %v\n", s.Step, s.Tokens, s.Loss < 1)
		}
	}
	if err := t.Save(ctx); err != nil {
		log.Fatal(err)
	}
	saved, err := ckpt.List(t.Result().Checkpoints)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("saved step", saved[0].Step)
	// Output:
	// step 1: 16 tokens, loss below 1: false
	// step 30: 16 tokens, loss below 1: true
	// saved step 30
}
