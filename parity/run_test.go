package parity_test

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/parity"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/train"
)

// counting is data that can be learned: every token is the one before plus the row's number.
type counting int

func (c counting) Take(_ context.Context, at data.Position, rows, _, _ int) (*data.Batch,
	data.Position, error) {
	const seq, vocab = 32, 32
	b := &data.Batch{Sequences: rows, Seq: seq}
	for row := range int64(rows) {
		n := at["count"] + row + 1000*int64(c)
		for i := range int64(seq) {
			token := func(i int64) int32 { return int32((n*11 + i*(1+n%3)) % vocab) }
			b.IDs, b.Labels = append(b.IDs, token(i)), append(b.Labels, token(i+1))
			b.Positions, b.Segments = append(b.Positions, int32(i)), append(b.Segments, 0)
		}
	}
	b.Count = int64(rows * seq)
	b.Total = b.Count
	return b, data.Position{"count": at["count"] + int64(rows)}, nil
}

// A small model branches off a state that was trained here; the same job gives the same bytes.
func TestRun(t *testing.T) {
	slowtest.Only(t) // compiles programs
	e, err := engine.Open(t.Context(), "cpu", engine.Options{Cache: enginetest.Cache()})
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	defer e.Close()
	c, err := model.Parse([]byte(`{"model_type": "llama", "vocab_size": 32, "hidden_size": 32,
"intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
"head_dim": 32, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
"hidden_act": "silu", "tie_word_embeddings": true}`))
	if err != nil {
		t.Fatal(err)
	}
	r := recipe.Default()
	r.Out, r.Steps, r.Batch, r.Microbatch, r.Seq = t.TempDir(), 3, 2, 2, 32
	r.Optimizer.LR, r.Optimizer.Warmup = 1e-2, 1
	policy, err := precision.Default(c, "mxfp8")
	if err != nil {
		t.Fatal(err)
	}
	bound := parity.Bound(c, policy, true)
	if bound != 0.05 || parity.Bound(c, policy, false) != 0.25 {
		t.Errorf("mxfp8 is held to %g %%", bound)
	}
	job := parity.Job{Engine: e, Model: c, Recipe: r, Pairs: 2, Branch: 4, Matched: true,
		Formats: []parity.Candidate{{Name: "mxfp8", Policy: policy, Bound: bound}},
		Rows:    func(seed int) (train.Dataset, error) { return counting(seed), nil },
		Init: func(seed int, p *model.Param, dst []float32) error {
			return c.Init(p, uint64(seed), dst)
		},
		Events: event.Discard, Now: func() time.Time { return time.Unix(0, 0) }}
	if err := parity.Trunk(t.Context(), job); err != nil {
		t.Fatal(err)
	}
	if job.From, err = ckpt.Latest(t.Context(), r.Out+"/checkpoints", event.Discard); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = job.From.Close() }()
	text := func() string {
		result, err := parity.Run(t.Context(), job)
		if err != nil {
			t.Fatal(err)
		}
		for _, one := range append(result.Matched, result.Null, result.Formats[0]) {
			if len(one.Gaps) != 2 || one.Mean == 0 {
				t.Errorf("%s has the gaps %v", one.Name, one.Gaps)
			}
		}
		js, err := json.Marshal(result)
		if err != nil {
			t.Fatal(err)
		}
		return string(js)
	}
	if a, b := text(), text(); a != b {
		t.Errorf("two runs differ:\n%s\n%s", a, b)
	}
}
