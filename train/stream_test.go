package train_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/train"
)

// streamOf writes batches of squares as another program does, and a last record.
func streamOf(t *testing.T, batches int, last ...byte) []byte {
	t.Helper()
	var w bytes.Buffer
	w.WriteString("deepwell")
	number := func(list ...int32) {
		if err := binary.Write(&w, binary.LittleEndian, list); err != nil {
			t.Fatal(err)
		}
	}
	number(1, 4, 8, 1, 0)
	at := data.Position{}
	for range batches {
		b, after, err := squares{8}.Take(t.Context(), at, 4, 0, 1)
		if err != nil {
			t.Fatal(err)
		}
		at = after
		number(1, 4+2*4*32, 3)
		number(b.IDs...)
		number(b.Labels...)
	}
	w.Write(last)
	return w.Bytes()
}

func streamed(t *testing.T, o train.Options, r io.Reader) train.Options {
	t.Helper()
	s, err := data.NewStream(t.Context(), r, 4, 8)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	o.Data, o.Eval = s, nil
	return o
}

var streamEnd = []byte{2, 0, 0, 0, 0, 0, 0, 0}

// newest is the step of the newest checkpoint.
func newest(t *testing.T, tr *train.Trainer) int64 {
	t.Helper()
	steps, err := ckpt.List(tr.Result().Checkpoints)
	if err != nil || len(steps) == 0 {
		return 0
	}
	step := int64(0)
	for _, s := range steps {
		step = max(step, s.Step)
	}
	return step
}

// A run of a stream makes the bits of a run that reads the same batches itself, also if the stream
// ends, fails, or is truncated on the way and the run resumes with a new one.
func TestRunsOfAStream(t *testing.T) {
	whole := begin(t, options(t, t.TempDir()))
	if err := whole.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	for name, one := range map[string]struct {
		last []byte
		code diag.Code
	}{
		"end":       {streamEnd, ""},
		"error":     {append([]byte{3, 0, 0, 0, 4, 0, 0, 0}, "gone"...), diag.DataRead},
		"truncated": {nil, diag.DataRead},
	} {
		t.Run(name, func(t *testing.T) {
			o := options(t, t.TempDir())
			tr := begin(t, streamed(t, o, bytes.NewReader(streamOf(t, 4, one.last...))))
			err := tr.Run(t.Context())
			if one.code == "" && err != nil || one.code != "" && !errors.Is(err, one.code) {
				t.Fatal(err)
			}
			if tr.Result().Step != 4 || newest(t, tr) != 4 {
				t.Fatalf("step %d, saved %d", tr.Result().Step, newest(t, tr))
			}
			tr.Close()
			tr = begin(t, streamed(t, o, bytes.NewReader(streamOf(t, 6, streamEnd...))))
			if err := tr.Run(t.Context()); err != nil || newest(t, tr) != 6 {
				t.Fatal(err)
			}
			if !maps.EqualFunc(params(t, tr), params(t, whole), slices.Equal) {
				t.Error("the parameters differ")
			}
		})
	}
}

// stepSink cancels a context after a step.
type stepSink struct{ cancel context.CancelCauseFunc }

func (s stepSink) Emit(e event.Event) {
	if _, ok := e.(event.Step); ok {
		s.cancel(errors.New("enough"))
	}
}

// A run that waits for data stops when it is asked to, with a checkpoint.
func TestStopWhileWaitingForData(t *testing.T) {
	r, w := io.Pipe()
	go func() { _, _ = w.Write(streamOf(t, 1)) }() // and then nothing
	stop, cancel := context.WithCancelCause(t.Context())
	o := streamed(t, options(t, t.TempDir()), r)
	o.Events = stepSink{cancel}
	tr := begin(t, o)
	start := time.Now()
	if err := tr.Run(stop); !errors.Is(err, diag.Canceled) || newest(t, tr) != 1 {
		t.Errorf("%v, saved %d", err, newest(t, tr))
	}
	if d := time.Since(start); d > 15*time.Second {
		t.Errorf("it took %v to stop", d)
	}
}
