package train_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"testing"

	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/train"
)

// finite is a dataset that breaks the contract: at its end it gives an error.
type finite struct {
	squares
	end int64
	err error
}

func (d finite) Take(ctx context.Context, at data.Position, sequences, rank, ranks int) (*data.Batch,
	data.Position, error) {
	if at["squares"] >= d.end {
		return nil, nil, d.err
	}
	return d.squares.Take(ctx, at, sequences, rank, ranks)
}

func (d finite) Eval(context.Context, int64, int, int, int) (*data.Batch, error) { return nil, d.err }

// The end of a dataset is not the end of the run.
func TestErrorsOfADatasetAreNoEOF(t *testing.T) {
	for name, given := range map[string]error{"EOF": io.EOF, "wrapped EOF": fmt.Errorf("shard 3: %w", io.EOF),
		"EOF with a code": diag.New(diag.DataCache, "truncated").Wrap(io.EOF)} {
		t.Run(name, func(t *testing.T) {
			o := options(t, t.TempDir())
			d := finite{squares{8}, 4, given}
			o.Data, o.Eval = d, d
			tr := begin(t, o)
			if _, err := tr.Step(t.Context()); err != nil {
				t.Fatal(err)
			}
			for range 2 { // the next call takes the same batch again
				_, err := tr.Step(t.Context())
				if errors.Is(err, io.EOF) || !errors.Is(err, diag.DataRead) || !errors.Is(err, io.ErrUnexpectedEOF) {
					t.Errorf("Step: %v", err)
				}
			}
			if loss, err := tr.Eval(t.Context()); loss != 0 || errors.Is(err, io.EOF) || !errors.Is(err, diag.DataRead) {
				t.Errorf("Eval: %v, %v", loss, err)
			}
			if err := tr.Run(t.Context()); err == nil || errors.Is(err, io.EOF) {
				t.Errorf("Run: %v", err)
			}
			if got := tr.Result().Step; got != 1 {
				t.Errorf("%d steps were made", got)
			}
		})
	}
	own := errors.New("the disk is gone")
	o := options(t, t.TempDir())
	o.Data = finite{squares{8}, 0, own}
	if _, err := begin(t, o).Step(t.Context()); !errors.Is(err, own) || !errors.Is(err, diag.DataRead) {
		t.Errorf("an error without a code: %v", err)
	}
	coded := diag.New(diag.DataCache, "truncated")
	o = options(t, t.TempDir())
	o.Data = finite{squares{8}, 0, coded}
	if _, err := begin(t, o).Step(t.Context()); !errors.Is(err, diag.DataCache) {
		t.Errorf("an error with a code: %v", err)
	}
}

// blocked is a dataset that gives a batch only once it is let go, or when nobody wants it anymore.
type blocked struct {
	squares
	begun chan struct{}
	let   chan struct{}
}

func (d blocked) Take(ctx context.Context, at data.Position, sequences, rank, ranks int) (*data.Batch,
	data.Position, error) {
	d.begun <- struct{}{}
	select {
	case <-d.let:
		return d.squares.Take(ctx, at, sequences, rank, ranks)
	case <-ctx.Done():
		return nil, nil, ctx.Err()
	}
}

// A step that is canceled while it waits for data can be called again; Close cancels the read.
func TestCanceledWhileWaitingForData(t *testing.T) {
	o := options(t, t.TempDir())
	d := blocked{squares{8}, make(chan struct{}, 9), make(chan struct{})}
	o.Data = d
	tr := begin(t, o)
	why := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	go func() {
		<-d.begun
		cancel(why)
	}()
	for range 2 { // also a context that has ended before
		if _, err := tr.Step(ctx); !errors.Is(err, diag.Canceled) || !errors.Is(err, why) {
			t.Errorf("canceled: %v", err)
		}
	}
	d.let <- struct{}{}
	if r, err := tr.Step(t.Context()); err != nil || r.Step != 1 {
		t.Errorf("the step after: %v, %v", r, err)
	}
	<-d.begun
	tr.Close() // the second batch is being read
}

// A batch of another shape is refused, wherever it comes from.
func TestBatchesAreChecked(t *testing.T) {
	tr := begin(t, options(t, t.TempDir()))
	good, _, err := squares{8}.Take(t.Context(), nil, 4, 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	three, short := *good, *good
	three.Sequences, short.Segments = 3, short.Segments[1:]
	for name, b := range map[string]*data.Batch{"nil": nil, "three": &three, "short": &short} {
		if _, err := tr.Gradients(t.Context(), b); !errors.Is(err, diag.BadInput) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, _, err := tr.Update(t.Context(), 1e-3); !errors.Is(err, diag.BadInput) {
		t.Errorf("an update without gradients: %v", err)
	}
	if _, err := tr.Gradients(t.Context(), good); err != nil {
		t.Fatal(err)
	}
	if _, applied, err := tr.Update(t.Context(), 1e-3); err != nil || !applied {
		t.Errorf("%v, %v", applied, err)
	}
	if _, _, err := tr.Update(t.Context(), 1e-3); !errors.Is(err, diag.BadInput) {
		t.Errorf("a second update: %v", err)
	}
	r, err := tr.Step(t.Context()) // the dataset's first batch: Update has not moved the position
	if err != nil || r.Step != 2 || !(r.Seconds > 0) {
		t.Errorf("%+v, %v", r, err)
	}
}

// A rejected step takes time, too.
func TestSecondsOfARejectedStep(t *testing.T) {
	o := options(t, t.TempDir())
	o.Init = func(_ *model.Param, dst []float32) error {
		for i := range dst {
			dst[i] = float32(math.NaN())
		}
		return nil
	}
	r, err := begin(t, o).Step(t.Context())
	if err != nil || r.Rejected == "" || !(r.Seconds > 0) {
		t.Errorf("%+v, %v", r, err)
	}
}

var _ interface {
	train.Dataset
	train.EvalSource
	train.Digester
	train.ReadyChecker
	train.Adopter
} = (*data.Loader)(nil)
