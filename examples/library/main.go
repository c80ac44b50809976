// Command library plans, trains and saves a model of its own on data of its own, with Deepwell's
// exported packages alone.
//
//	deepwell engine install cpu     # once
//	cd examples/library
//	go run . /tmp/counting          # a folder for checkpoints; a second run resumes from it
//
// It is a module of its own. Copy the folder to begin a program, and let the replace line of go.mod
// point to your clone of Deepwell.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"

	"github.com/deepwell/deepwell/autoplan"
	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/train"
)

// config describes a tiny Llama, in the form of Hugging Face's config.json.
const config = `{"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "hidden_act": "silu",
"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
"num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}`

// counting is a train.Dataset: sequence n counts in steps of n%3 + 1, modulo the vocabulary.
type counting struct{ seq int }

// Take returns the next sequences, and the position behind them. Checkpoints store the position, so
// that a resumed run goes on with the next sequence.
func (d counting) Take(_ context.Context, at data.Position, sequences, _, _ int) (*data.Batch,
	data.Position, error) {
	first, list := at["counting"], make([][]int32, sequences)
	for i := range list {
		for k := range int64(d.seq + 1) { // seq inputs, and the label of the last one
			n := first + int64(i)
			list[i] = append(list[i], int32((n+k*(n%3+1))%64))
		}
	}
	batch, err := data.NewBatch(list)
	return batch, data.Position{"counting": first + int64(sequences)}, err
}

func main() {
	if len(os.Args) != 2 {
		log.Fatal("usage: library FOLDER")
	}
	ctx, m := context.Background(), must(model.Parse([]byte(config)))

	// A plan says how two CPU devices share the work. Capacity is the memory in bytes that a plan may
	// use on each device: of a GPU it is known, of a CPU device it must be given.
	found := must(autoplan.Search(ctx, autoplan.Job{Model: "own", Config: m, Seq: 32, Batch: 8,
		Cluster: must(machine.ParseCluster("2xcpu")), Devices: 2, Capacity: 1 << 30,
		Precisions: []dtype.Format{dtype.FormatF32}}))
	plan := found.Choices[0].Plan // the fastest

	// The recipe is what run.toml holds for the command.
	r := recipe.Default()
	r.Out, r.Steps, r.Batch, r.Seq, r.Precision = os.Args[1], 60, 8, 32, dtype.F32
	r.Optimizer.LR, r.Optimizer.Warmup = 1e-2, 5

	e := must(engine.Open(ctx, "cpu", engine.Options{Devices: 2}))
	defer e.Close()
	// New resumes from the newest checkpoint in r.Out, if there is one.
	t := must(train.New(ctx, train.Options{Engine: e, Model: m, Recipe: r, Plan: plan,
		Data: counting{r.Seq}}))
	defer t.Close()
	for {
		s, err := t.Step(ctx)
		if errors.Is(err, io.EOF) { // after the last step
			break
		} else if err != nil {
			log.Fatal(err)
		}
		if s.Step%20 == 0 {
			fmt.Printf("step %d loss %.2f\n", s.Step, s.Loss)
		}
	}
	if err := t.Save(ctx); err != nil {
		log.Fatal(err)
	}
}

// must ends the program on an error: enough for an example.
func must[T any](value T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return value
}
