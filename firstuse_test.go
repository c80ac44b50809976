package deepwell

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/deepwell/deepwell/capture"
	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/kernels/fused"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/step"
)

// kept keeps events.
type kept struct {
	mu   sync.Mutex
	list []event.Event
}

func (k *kept) Emit(e event.Event) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.list = append(k.list, e)
}

// A kernel that differs on a GPU, or does not run there, is in none of the run's programs, and the
// event says so; the others stay.
func TestKernelsThatDiffer(t *testing.T) {
	t.Parallel()
	text := `model = "qwen3-0.6b"
init = "random"
precision = "mxfp8"
seq = 64
batch = 2
steps = 1
out = "out"
[data]
sources = ["-"]
`
	rc, err := recipe.Parse([]byte(text), "run.toml", nil, func(string) string { return "" })
	if err != nil {
		t.Fatal(err)
	}
	m, err := capture.Open(rc.Model, capture.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = m.Close() }()
	sink := &kept{}
	r := &runner{env: &Env{Events: sink}, recipe: rc, model: m, stream: &data.Stream{},
		devices: devices{gpus: []machine.GPU{{Model: "b200", Arch: "sm_100", MemoryBytes: 180 << 30}}}}
	if err := r.writePrograms(); err != nil {
		t.Fatal(err)
	}
	keys := func() (list []string) {
		for _, text := range ownSpecs(r.program) {
			k, err := kernelOf(text)
			if err != nil {
				t.Fatal(err)
			}
			list = append(list, k.Key)
		}
		return list
	}
	swiglu, norm, loss := keyOf(t, "swiglu"), keyOf(t, "rms_norm"), fused.Loss{}.Key()
	if all := keys(); !slices.Contains(all, swiglu) || !slices.Contains(all, norm) ||
		!slices.Contains(all, loss) {
		t.Fatalf("the programs have %q", all)
	}
	closed := false
	if err := r.compareKernels(t.Context(), func() (comparer, func()) {
		return func(_ context.Context, spec string) (float64, error) {
			switch k, _ := kernelOf(spec); k.Key {
			case swiglu, loss:
				return 0.3, nil
			case norm:
				return 0, errors.New("an illegal address")
			}
			return 1e-4, nil
		}, func() { closed = true }
	}); err != nil {
		t.Fatal(err)
	}
	after := keys()
	if slices.Contains(after, swiglu) || slices.Contains(after, norm) || slices.Contains(after, loss) ||
		len(after) == 0 || !closed {
		t.Errorf("the programs have %q", after)
	}
	var lines []string
	for _, e := range sink.list {
		if d, ok := e.(event.KernelDiffers); ok {
			lines = append(lines, d.Line())
		}
	}
	all := strings.Join(lines, "\n")
	if len(lines) != 3 || !strings.Contains(all, "differs on this GPU") ||
		!strings.Contains(all, "an illegal address") {
		t.Errorf("events: %s", all)
	}
}

func keyOf(t *testing.T, name string) string {
	t.Helper()
	s, err := fused.Find(name)
	if err != nil {
		t.Fatal(err)
	}
	return "mxfp8: " + s.Expr.String()
}

// A kernel whose plain form is not known, or that is refused and called still, ends the run.
func TestRefusedKernelsAreGone(t *testing.T) {
	t.Parallel()
	if _, err := kernelOf("swigloo bf16"); diag.From(err).Code != diag.Internal {
		t.Errorf("got %v", err)
	}
	const spec = "grouped bf16 24576x14336x4096 experts=8 filled=17408 weights=keo"
	k, err := kernelOf(spec)
	if err != nil {
		t.Fatal(err)
	}
	p := &step.Programs{List: []*step.Program{{Module: &program.Module{Text: `spec = "` + spec + `"`}}}}
	if err := withoutKernels(p, nil); err != nil {
		t.Error(err)
	}
	if err := withoutKernels(p, []string{k.Key}); diag.From(err).Code != diag.Internal {
		t.Errorf("got %v", err)
	}
}
