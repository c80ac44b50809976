package isolate

import (
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/deepwell/deepwell/diag"
)

const workVerb = "__work"

// An errand is a request of the test's worker: it comes back, fails, crashes or hangs.
type errand struct {
	Words string
	Flags map[string]any
}

func work(e *errand) (*errand, error) {
	switch e.Words {
	case "fail":
		return nil, diag.New(diag.NotSupported, "the worker does not want to").Try("ask another one")
	case "crash":
		_ = syscall.Kill(os.Getpid(), syscall.SIGABRT)
		select {}
	case "hang":
		select {}
	}
	return e, nil
}

func worker(t *testing.T, child string) *Worker {
	t.Helper()
	w, err := OpenWorker(t.Context(), workVerb, Options{Child: child, Log: io.Discard})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Close)
	return w
}

// A worker answers in order, and goes on after an error.
func TestWorkerAnswers(t *testing.T) {
	w := worker(t, Self)
	for range 3 {
		sent := errand{strings.Repeat("x", 1<<20), map[string]any{"a": true, "b": 1, "c": 1.0, "d": "1"}}
		var got errand
		if err := w.Ask(t.Context(), "on words", &sent, &got); err != nil || !cmp.Equal(sent, got) {
			t.Fatal(err, cmp.Diff(sent, got))
		}
		err := w.Ask(t.Context(), "on words", &errand{Words: "fail"}, &got)
		if e, ok := errors.AsType[*diag.Error](err); !ok || e.Code != diag.NotSupported || e.Fix == "" {
			t.Errorf("%v", err)
		}
	}
	if !w.Alive() {
		t.Error("an error ended the worker")
	}
}

// A crash, a context that ends, and a child that is something else are one error each, which every
// later request gets.
func TestWorkersThatEnd(t *testing.T) {
	late, stop := context.WithCancel(t.Context())
	for _, row := range []struct {
		words, child string
		code         diag.Code
		says         string
	}{
		{"crash", Self, diag.CompilerCrashed, "SIGABRT"},
		{"hang", Self, diag.Canceled, "stopped"},
		{"", script(t, "echo junk >&3"), diag.CompilerCrashed, "on words"},
	} {
		w, ctx := worker(t, row.child), t.Context()
		if row.words == "hang" {
			ctx = late
			stop()
			if err := w.Ask(ctx, "on words", &errand{}, &errand{}); !w.Alive() {
				t.Errorf("a context that had ended before ended the worker: %v", err)
			}
			ctx, stop = context.WithCancel(t.Context())
			go stop()
		}
		err := w.Ask(ctx, "on words", &errand{Words: row.words}, &errand{})
		e := diag.From(err)
		if e == nil || e.Code != row.code || !strings.Contains(e.Format(), row.says) {
			t.Errorf("%q: want %s with %q, got %v", row.words, row.code, row.says, err)
		}
		if again := w.Ask(t.Context(), "on words", &errand{}, &errand{}); row.words == "crash" &&
			(!errors.Is(again, err) || w.Alive()) {
			t.Errorf("a dead worker gave %v", again)
		}
	}
}
