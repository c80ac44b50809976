package train_test

import (
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/train"
)

// uses are the methods that a trainer refuses when it can only be closed.
func uses(tr *train.Trainer, b *data.Batch) map[string]func() error {
	ctx := context.Background()
	return map[string]func() error{
		"Step":      func() error { _, err := tr.Step(ctx); return err },
		"Run":       func() error { return tr.Run(ctx) },
		"Eval":      func() error { _, err := tr.Eval(ctx); return err },
		"Save":      func() error { return tr.Save(ctx) },
		"Load":      func() error { return tr.Load(ctx, "nowhere") },
		"Gradients": func() error { _, err := tr.Gradients(ctx, b); return err },
		"Update":    func() error { _, _, err := tr.Update(ctx, 1e-3); return err },
		"Params":    func() error { _, err := tr.Params(ctx); return err },
		"Rerun":     func() error { _, err := tr.Rerun(ctx, "nowhere"); return err },
	}
}

// canceling is a dataset that cancels a step while the batch of the next one is read: the devices
// have begun.
type canceling struct {
	squares
	cancel context.CancelFunc
}

func (d canceling) Take(ctx context.Context, at data.Position, n, rank, ranks int) (*data.Batch,
	data.Position, error) {
	if at["squares"] > 0 {
		d.cancel()
	}
	return d.squares.Take(ctx, at, n, rank, ranks)
}

// After an abandoned step, the next Step took the batch after the lost one, and Save wrote a
// checkpoint that had skipped it.
func TestAnAbandonedStepClosesTheTrainer(t *testing.T) {
	for try := range 20 { // the step may be faster than the cancellation
		ctx, cancel := context.WithCancel(t.Context())
		o := options(t, t.TempDir())
		o.Data = canceling{squares{8}, cancel}
		tr := begin(t, o)
		_, err := tr.Step(ctx)
		if err == nil {
			continue
		}
		if !errors.Is(err, diag.Canceled) {
			t.Errorf("try %d: %v", try, err)
		}
		good, _, err := squares{8}.Take(t.Context(), nil, 4, 0, 1)
		if err != nil {
			t.Fatal(err)
		}
		for name, use := range uses(tr, good) {
			if err := use(); !errors.Is(err, diag.TrainerClosed) {
				t.Errorf("%s after an abandoned step: %v", name, err)
			}
		}
		if _, err := os.Stat(filepath.Join(o.Recipe.Out, "checkpoints")); err == nil {
			t.Error("a checkpoint was written")
		}
		return
	}
	t.Skip("no step was canceled in time")
}

// Params after Close was a nil dereference, and other methods spoke of missing arrays.
func TestUseAfterClose(t *testing.T) {
	tr := begin(t, options(t, t.TempDir()))
	good, _, err := squares{8}.Take(t.Context(), nil, 4, 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	tr.Close()
	for name, use := range uses(tr, good) {
		if err := use(); !errors.Is(err, diag.TrainerClosed) {
			t.Errorf("%s after Close: %v", name, err)
		}
	}
	if r := tr.Result(); r.Step != 0 || tr.Programs() == nil {
		t.Errorf("%+v", r)
	}
	tr.Close() // a second time
}

// Two trainers in one folder mixed their checkpoints without a word.
func TestOneTrainerToAFolder(t *testing.T) {
	o := options(t, t.TempDir())
	first := begin(t, o)
	if _, err := train.New(t.Context(), o); !errors.Is(err, diag.RunBusy) {
		t.Errorf("a second trainer: %v", err)
	}
	first.Close()
	begin(t, o)
	r := *o.Recipe
	r.Out, o.Recipe = "", &r
	if _, err := train.New(t.Context(), o); !errors.Is(err, diag.BadInput) {
		t.Errorf("a run without a folder: %v", err)
	}
}

// An embedding clamps the ids that it does not have, and the loss of such a label is another's: a
// run with the wrong tokenizer trained.
func TestTokensAreOfTheVocabulary(t *testing.T) {
	tr := begin(t, options(t, t.TempDir()))
	for name, spoil := range map[string]func(b *data.Batch){
		"id":                 func(b *data.Batch) { b.IDs[9] = 31 },
		"negative id":        func(b *data.Batch) { b.IDs[9] = -1 },
		"label":              func(b *data.Batch) { b.Labels[9] = 31 },
		"the label of torch": func(b *data.Batch) { b.Labels[9] = -100 },
		"position":           func(b *data.Batch) { b.Positions[9] = 8 },
	} {
		b, _, err := squares{8}.Take(t.Context(), nil, 4, 0, 1)
		if err != nil {
			t.Fatal(err)
		}
		spoil(b)
		if _, err := tr.Gradients(t.Context(), b); !errors.Is(err, diag.BadInput) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The loss is the mean over the labels that are there, whatever Count and Total say: both 0 gave a
// loss of 531.
func TestLabelsAreCounted(t *testing.T) {
	tr := begin(t, options(t, t.TempDir()))
	loss := func(change func(b *data.Batch)) float64 {
		b, _, err := squares{8}.Take(t.Context(), nil, 4, 0, 1)
		if err != nil {
			t.Fatal(err)
		}
		change(b)
		got, err := tr.Gradients(t.Context(), b)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	want := loss(func(*data.Batch) {})
	for _, n := range []int64{0, 7} {
		if got := loss(func(b *data.Batch) { b.Count, b.Total = n, n }); got != want {
			t.Errorf("with a total of %d the loss is %g, not %g", n, got, want)
		}
	}
	// Without the first sequence the loss is the mean of the three others: near the old one at random
	// weights, where a quarter of the labels less in the mean would lack a quarter of it.
	masked := loss(func(b *data.Batch) {
		for i := range 8 {
			b.Labels[i] = data.Ignored
		}
	})
	if math.Abs(masked-want) > 0.1*want {
		t.Errorf("masking a sequence moves the loss from %g to %g", want, masked)
	}
}

// stuck is a dataset without a position.
type stuck struct{ squares }

func (d stuck) Take(ctx context.Context, at data.Position, n, rank, ranks int) (*data.Batch,
	data.Position, error) {
	b, _, err := d.squares.Take(ctx, at, n, rank, ranks)
	return b, nil, err
}

// Without a position a run would repeat its first batch for ever.
func TestADatasetWithoutAPosition(t *testing.T) {
	o := options(t, t.TempDir())
	o.Data = stuck{squares{8}}
	if _, err := begin(t, o).Step(t.Context()); !errors.Is(err, diag.BadInput) {
		t.Error(err)
	}
}

// The final learning rate of a recipe in code follows LR, as in run.toml.
func TestFinalLearningRateFollowsLR(t *testing.T) {
	for _, lr := range []float64{1e-2, 1e-5} {
		o := options(t, t.TempDir())
		o.Recipe.Optimizer.LR, o.Recipe.Optimizer.Warmup = lr, 0
		tr := begin(t, o)
		last := 0.0
		for {
			r, err := tr.Step(t.Context())
			if err != nil {
				break
			}
			last = r.LR
		}
		if math.Abs(last-lr/10) > 0.1*lr {
			t.Errorf("lr %g ends at %g", lr, last)
		}
	}
}

// Programs of other sizes than the run's gave half the loss, or a panic.
func TestProgramsOfAnotherRecipe(t *testing.T) {
	o := options(t, t.TempDir())
	tr := begin(t, o)
	o.Programs = tr.Programs()
	tr.Close()
	for name, change := range map[string]func(o *train.Options, r *recipe.Recipe){
		"batch":      func(_ *train.Options, r *recipe.Recipe) { r.Batch = 8 },
		"microbatch": func(_ *train.Options, r *recipe.Recipe) { r.Microbatch = 2 },
		"seq":        func(_ *train.Options, r *recipe.Recipe) { r.Seq = 16 },
		"optimizer":  func(_ *train.Options, r *recipe.Recipe) { r.Optimizer.Name = "muon" },
		"model": func(o *train.Options, _ *recipe.Recipe) {
			c := *o.Model.(*model.Config)
			c.MLP, o.Model = 32, &c
		},
	} {
		bad, r := o, *o.Recipe
		bad.Recipe = &r
		change(&bad, &r)
		if _, err := train.New(t.Context(), bad); !errors.Is(err, diag.BadInput) {
			t.Errorf("another %s: %v", name, err)
		}
	}
	begin(t, o)
}

// panicking is a dataset with a bug.
type panicking struct{ squares }

func (panicking) Take(context.Context, data.Position, int, int, int) (*data.Batch, data.Position,
	error) {
	panic("a bug")
}

// empty has no validation sequences.
type empty struct{ squares }

func (empty) EvalSequences() int64 { return 0 }

// What a program gets wrong is an error with a code: none of these is a panic, or a wrong state.
func TestMistakesOfAProgram(t *testing.T) {
	o := options(t, t.TempDir())
	o.Data, o.Eval = panicking{}, empty{}
	tr := begin(t, o)
	if _, err := tr.Step(t.Context()); !errors.Is(err, diag.DataRead) {
		t.Errorf("a panic of the dataset: %v", err)
	}
	if _, err := tr.Eval(t.Context()); !errors.Is(err, diag.DataEmpty) {
		t.Errorf("a validation of nothing: %v", err)
	}
	good, _, err := squares{8}.Take(t.Context(), nil, 4, 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tr.Gradients(t.Context(), good); err != nil {
		t.Fatal(err)
	}
	for _, lr := range []float64{math.NaN(), math.Inf(1), -1} {
		if _, _, err := tr.Update(t.Context(), lr); !errors.Is(err, diag.BadInput) {
			t.Errorf("a learning rate of %g: %v", lr, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := tr.Update(ctx, 1e-3); !errors.Is(err, diag.Canceled) {
		t.Errorf("a canceled update: %v", err)
	}
	own := options(t, t.TempDir())
	own.Model = struct{ model.Model }{own.Model}
	if _, err := train.New(t.Context(), own); !errors.Is(err, diag.BadInput) {
		t.Errorf("a model without Init: %v", err)
	}
	own.Model = (*model.Config)(nil)
	if _, err := train.New(t.Context(), own); !errors.Is(err, diag.BadInput) {
		t.Errorf("a nil model: %v", err)
	}
}
