package train_test

import (
	"context"
	"errors"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"testing"

	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/train"
)

// squares is a dataset of one's own: token i of sequence n is (n+i)² mod 31.
type squares struct{ seq int }

func (d squares) Take(_ context.Context, at data.Position, sequences, _, _ int) (*data.Batch,
	data.Position, error) {
	n, list := at["squares"], make([][]int32, sequences)
	for i := range list {
		for k := range int64(d.seq + 1) {
			list[i] = append(list[i], int32((n+int64(i)+k)*(n+int64(i)+k)%31))
		}
	}
	b, err := data.NewBatch(list)
	return b, data.Position{"squares": n + int64(sequences)}, err
}

func (d squares) EvalSequences() int64 { return 4 }

func (d squares) Eval(ctx context.Context, first int64, sequences, rank, ranks int) (*data.Batch,
	error) {
	b, _, err := d.Take(ctx, data.Position{"squares": 1000 + first}, sequences, rank, ranks)
	return b, err
}

// halved is a model of one's own: a graph that no configuration makes.
type halved struct{ *model.Config }

func (m halved) Graph(s model.Shape) (*ir.Graph, error) {
	g, err := m.Config.Graph(s)
	if err != nil {
		return nil, err
	}
	return ir.Rewrite(g, func(r *ir.Rewriter, op *ir.Op) []*ir.Value {
		if op.Out[0] != g.Results[0] {
			return nil
		}
		return []*ir.Value{r.Scale(r.Copy(op)[0], 0.5)}
	})
}

// options describe a run in code; only what has no default is given.
func options(t *testing.T, out string) train.Options {
	t.Helper()
	e, err := engine.Open(t.Context(), "cpu", engine.Options{Cache: enginetest.Cache()})
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	t.Cleanup(e.Close)
	c := &model.Config{Arch: "llama", Vocab: 31, Hidden: 16, Layers: 1, Heads: 2, KVHeads: 1,
		HeadDim: 8, MLP: 24, Context: 32, Norm: model.Norm{Eps: 1e-5}, Activation: model.SiLU,
		Gated: true, Rope: ir.Rope{Theta: 100}, Rotary: 8, AttnScale: 0.35, BOS: -1}
	r := recipe.Default()
	r.Steps, r.Batch, r.Seq, r.Precision, r.Out = 6, 4, 8, dtype.F32, out
	r.Optimizer.LR = 1e-2
	return train.Options{Engine: e, Model: c, Recipe: r, Data: squares{r.Seq}, Eval: squares{r.Seq}}
}

func begin(t *testing.T, o train.Options) *train.Trainer {
	t.Helper()
	tr, err := train.New(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(tr.Close)
	return tr
}

func params(t *testing.T, tr *train.Trainer) map[string][]float32 {
	t.Helper()
	p, err := tr.Params(t.Context())
	if err != nil || len(p) == 0 {
		t.Fatalf("%d parameters, %v", len(p), err)
	}
	return p
}

// A loop of Step, Eval, Save and Load makes the bits of Run, and going back to a checkpoint of an
// earlier step makes them again.
func TestLoopOfOnesOwn(t *testing.T) {
	whole := begin(t, options(t, t.TempDir()))
	if err := whole.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := params(t, whole)
	out := t.TempDir()
	tr := begin(t, options(t, out))
	for tr.Result().Step < 3 {
		if r, err := tr.Step(t.Context()); err != nil || r.Step != tr.Result().Step || r.Rejected != "" ||
			!(r.Loss > 0 && r.GradNorm > 0 && r.LR > 0) || r.Tokens != 32 {
			t.Fatalf("%+v, %v", r, err)
		}
	}
	early, err := tr.Eval(t.Context())
	if err = errors.Join(err, tr.Save(t.Context())); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		for err = nil; err == nil; {
			_, err = tr.Step(t.Context())
		}
		if !errors.Is(err, io.EOF) || tr.Result().Step != 6 {
			t.Fatalf("step %d: %v", tr.Result().Step, err)
		}
		if got := params(t, tr); !maps.EqualFunc(got, want, slices.Equal) {
			t.Error("the parameters differ from the ones of Run")
		}
		if late, err := tr.Eval(t.Context()); err != nil || late >= early {
			t.Errorf("the validation loss goes from %v to %v, %v", early, late, err)
		}
		if err := tr.Load(t.Context(), filepath.Join(out, "checkpoints", "step-00000003")); err != nil {
			t.Fatal(err)
		}
		if again, err := tr.Eval(t.Context()); err != nil || again != early {
			t.Errorf("after Load the validation loss is %v, not %v, %v", again, early, err)
		}
	}
	tr.Close()                           // it has locked the folder
	resumed := begin(t, options(t, out)) // in code as by the command: from the newest checkpoint
	if got := resumed.Result().Step; got != 3 {
		t.Errorf("resumed from step %d", got)
	}
}

// Gradients and Update are the halves of a step, and a model need not be a Config.
func TestModelAndUpdatesOfOnesOwn(t *testing.T) {
	losses := map[bool]float64{}
	for _, own := range []bool{false, true} {
		o := options(t, t.TempDir())
		if own {
			o.Model = halved{o.Model.(*model.Config)}
		}
		tr := begin(t, o)
		before := params(t, tr)
		b, _, err := squares{8}.Take(t.Context(), nil, 4, 0, 1)
		if err != nil {
			t.Fatal(err)
		}
		if losses[own], err = tr.Gradients(t.Context(), b); err != nil {
			t.Fatal(err)
		}
		norm, applied, err := tr.Update(t.Context(), 1e-3)
		if err != nil || !applied || !(norm > 0) || tr.Result().Step != 1 {
			t.Fatalf("norm %v, %v, %v", norm, applied, err)
		}
		if maps.EqualFunc(before, params(t, tr), slices.Equal) {
			t.Error("the update changes nothing")
		}
	}
	if losses[true] != losses[false]/2 {
		t.Errorf("half of %v is not %v", losses[false], losses[true])
	}
}

// What a run lacks is an error that names the field, not a panic.
func TestOptionsAreChecked(t *testing.T) {
	o := options(t, t.TempDir())
	for name, spoil := range map[string]func(*train.Options){
		"engine": func(o *train.Options) { o.Engine = nil },
		"model":  func(o *train.Options) { o.Model = nil },
		"recipe": func(o *train.Options) { o.Recipe = nil },
		"steps": func(o *train.Options) {
			r := *o.Recipe
			r.Steps, o.Recipe = 0, &r
		},
	} {
		bad := o
		spoil(&bad)
		if tr, err := train.New(t.Context(), bad); err == nil || diag.From(err).Code == diag.Internal {
			tr.Close()
			t.Errorf("without %s: %v", name, err)
		}
	}
	o.Data, o.Eval = nil, nil
	tr := begin(t, o)
	if _, err := tr.Step(context.Background()); err == nil {
		t.Error("a step without data")
	}
	if _, err := tr.Eval(context.Background()); err == nil {
		t.Error("a validation without data")
	}
}
