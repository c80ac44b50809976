package train

import (
	"encoding/binary"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/precision"
)

// A fault is something that goes wrong in a run after its trained steps, and what is to come of it.
type fault struct {
	name  string
	site  string // the weight of a linear layer
	kind  string
	level func(k int) float64 // of its k-th step, counted from 1
	steps int
	seen  int    // the first step whose level can be seen
	falls string // products
	whole bool   // the update is refused as well, in the step of the first sign
}

// trained is how many steps a model makes before something goes wrong, after how many follow, and
// compared how many of these the loss is the mean of. A fault must be found within soon steps.
const trained, after, compared, soon = 160, 48, 12, 3

// backWithin is how far the loss may be from the loss of the run without the fault.
const backWithin = 0.01

func grows(k int) float64 { return math.Pow(10, float64(k)/2) }

func constant(level float64) func(int) float64 { return func(int) float64 { return level } }

// faults returns the faults of one format. One channel of an input that grows by the root of ten in each
// step is seen when it is a hundred times itself; one channel of 32 of a gradient at 30 times; the
// rest at once.
func faults(format string) []fault {
	const forward, backward = "fprop wgrad", "dgrad wgrad"
	list := []fault{
		{"outlier", "block.down.1", "outlier", grows, 8, 4, forward, false},
		{"outlier", "block.q.1", "outlier", grows, 8, 4, forward, false},
		{"underflow 1e-3", "block.down.1", "gradient", constant(1e-3), 6, 1, backward, false},
		{"underflow 1e-20", "block.q.0", "gradient", constant(1e-20), 6, 1, backward, false},
		{"channels", "block.down.1", "channels", grows, 8, 3, backward, false},
		{"nan x", "block.q.1", "nan x", constant(1), 3, 1, forward, true},
		{"nan dy", "block.down.1", "nan dy", constant(1), 1, 1, backward, true},
		{"nan dw", "block.q.0", "nan dw", constant(1), 2, 1, "wgrad", true},
		{"labels", "", "labels", constant(1), 1, 1, "", true},
		{"repeats", "", "repeats", constant(1), 1, 1, "", true},
		{"scale bit 6", "block.down.1", "w", constant(6), 1, 1, "fprop", true},
		{"scale bit 0", "block.q.0", "wT", constant(0), 1, 1, "dgrad", true},
	}
	if format == "nvfp4" {
		return list
	}
	return append(list, []fault{
		{"outlier", "block.down.0", "outlier", grows, 8, 4, forward, false},
		{"underflow 1e-6", "block.down.0", "gradient", constant(1e-6), 6, 1, backward, false},
		{"underflow 1e-38", "block.down.1", "gradient", constant(1e-38), 6, 1, backward, false},
		{"channels", "block.q.0", "channels", grows, 8, 3, backward, false},
		{"nan x", "block.down.0", "nan x", constant(1), 1, 1, forward, true},
		{"nan dy", "block.q.0", "nan dy", constant(1), 3, 1, backward, true},
		{"nan dw", "block.down.1", "nan dw", constant(1), 1, 1, "wgrad", true},
		{"nan dw", "block.gate.0", "nan dw", constant(1), 1, 1, "", true}, // in bf16 as it is
		{"ids", "", "ids", constant(1), 2, 1, "", true},
		{"scale bit 3", "block.down.0", "w", constant(3), 1, 1, "fprop", true},
		{"scale bit 5", "block.q.1", "wT", constant(5), 1, 1, "dgrad", true},
	}...)
}

// poisons are what is wrong with the data.
func (f *fault) poisons() map[int64]func(*data.Batch) {
	all := map[int64]func(*data.Batch){}
	for k := range f.steps {
		rnd := rand.New(rand.NewPCG(5, uint64(k)))
		garbage := func(list []int32) {
			for i := range list {
				list[i] = int32(rnd.IntN(64))
			}
		}
		switch f.kind {
		case "labels":
			all[int64(trained+1+k)] = func(b *data.Batch) { garbage(b.Labels) }
		case "ids":
			all[int64(trained+1+k)] = func(b *data.Batch) { garbage(b.IDs) }
		case "repeats":
			all[int64(trained+1+k)] = func(b *data.Batch) {
				for i := range b.IDs {
					b.IDs[i], b.Labels[i] = 9, 9
				}
			}
		}
	}
	return all
}

// breaks puts a fault in the way of a run.
func (p *post) breaks(tr *Trainer, f *fault) {
	fill := func(name string, value func(i int) float64) error {
		return tr.change(name, func(b []byte) {
			for i := range len(b) / 4 {
				binary.LittleEndian.PutUint32(b[4*i:], math.Float32bits(float32(value(i))))
			}
		})
	}
	tr.intercept(func(step int) error {
		k := step - trained
		if f == nil || k < 1 || k > f.steps+1 {
			return nil
		}
		over := k > f.steps
		return f.before(tr, fill, over, f.level(k))
	}, func(step int) error {
		if k := step - trained; f != nil && f.kind == "nan dw" && k >= 1 && k <= f.steps {
			return tr.change("g."+f.site, func(b []byte) {
				binary.LittleEndian.PutUint32(b[4*77:], 0x7fc00000)
			})
		}
		return nil
	})
}

// before does what goes wrong before a step, or ends it.
func (f *fault) before(tr *Trainer, fill func(string, func(int) float64) error, over bool,
	level float64) error {
	only := func(value float64, here func(i int) bool) func(int) float64 {
		return func(i int) float64 {
			if !over && here(i) {
				return value
			}
			return 1
		}
	}
	in := 64
	if strings.Contains(f.site, "down") {
		in = 128
	}
	place := func(i int) bool { return i == 1000 }
	switch f.kind {
	case "outlier": // one channel
		return fill(faultX+f.site, only(level, func(i int) bool { return i%in == 5 }))
	case "nan x":
		return fill(faultX+f.site, only(math.NaN(), place))
	case "gradient": // all of it
		return fill(faultDY+f.site, only(math.Sqrt(level), func(int) bool { return true }))
	case "channels": // one of 32
		return fill(faultDY+f.site, only(math.Sqrt(level), func(i int) bool { return i%32 == 5 }))
	case "nan dy":
		return fill(faultDY+f.site, only(1e38, place))
	case "w", "wT":
		// A bit of a scale of the copy that fprop or dgrad reads, on one device: the checksum is the
		// sum of all devices' bytes, in which a bit that is set on one and cleared on another cancels.
		if !over {
			var once sync.Once
			return tr.change(f.scales(tr), func(b []byte) {
				once.Do(func() { b[7] ^= 1 << int(level) })
			})
		}
	}
	return nil
}

// where gives the layer and the linear of the site.
func (f *fault) where() (layer int, linear string) {
	words := strings.Split(f.site, ".")
	if len(words) < 3 {
		return -1, ""
	}
	return int(words[2][0] - '0'), words[1]
}

// scales names the array that is changed.
func (f *fault) scales(tr *Trainer) string {
	layer, linear := f.where()
	for _, row := range tr.Programs().List {
		for _, s := range row.Stats {
			here := s.Layer <= int64(layer) && int64(layer) < s.Layer+s.Layers
			if here && s.Slot == int64(precision.Slot(linear)) && s.Operand == f.kind {
				return s.Copy
			}
		}
	}
	return ""
}

// judge holds the events of a run with the fault to what was to come of it.
func (f *fault) judge(t *testing.T, l *log) {
	t.Helper()
	layer, linear := f.where()
	first, refused, falls, back := 0, false, map[string]bool{}, map[string]bool{}
	for _, e := range l.list {
		d, ok := e.(event.Precision)
		if !ok {
			continue
		}
		t.Log(d.Text)
		switch d.What {
		case "fall":
			falls[d.Product] = true
			if d.Layer != layer || d.Linear != linear || !strings.Contains(f.falls, d.Product) {
				t.Errorf("the wrong product falls")
			}
		case "return":
			back[d.Product] = true
		case "refuse":
			refused = refused || d.Step-trained >= f.seen && d.Step-trained < f.seen+soon
		}
		if first == 0 && d.What != "warn" && (f.falls == "" || d.What == "fall") {
			first = d.Step - trained
		}
		if d.Signal == "" || d.Text == "" || d.Value == 0 && d.Usual == 0 {
			t.Errorf("an event without its numbers: %+v", d)
		}
	}
	if first < 1 || first >= f.seen+soon {
		t.Errorf("found in its step %d, could be seen in step %d", first, f.seen)
	}
	if want := strings.Fields(f.falls); len(falls) != len(want) || len(back) != len(want) {
		t.Errorf("%v fell and %v returned, not %v", falls, back, want)
	}
	if f.whole && !refused {
		t.Errorf("no update was refused")
	}
	t.Logf("found in its step %d, can be seen in step %d; falls %q, refused %v", first, f.seen,
		f.falls, refused)
}

// finite holds all checkpoints of a run to numbers.
func (p *post) finite(out string) {
	p.t.Helper()
	paths, err := filepath.Glob(filepath.Join(checkpoints(out), "step-*"))
	if err != nil || len(paths) < after {
		p.t.Fatalf("%d checkpoints, %v", len(paths), err)
	}
	for _, path := range paths {
		c, err := ckpt.Open(path)
		if err != nil {
			p.t.Fatal(err)
		}
		for _, one := range c.Tensors() {
			b := make([]byte, one.Bytes())
			if err := c.ReadSlice(one.Name, one.Box(), b); err != nil {
				p.t.Fatal(err)
			}
			for i := 0; i < len(b); i += 4 {
				if x := binary.LittleEndian.Uint32(b[i:]); x&0x7f800000 == 0x7f800000 {
					p.t.Fatalf("%s of %s is not finite", one.Name, path)
				}
			}
		}
		_ = c.Close()
	}
}

// from begins a run with the checkpoint of another.
func (p *post) from(base, out string) {
	p.t.Helper()
	if err := os.CopyFS(checkpoints(out), os.DirFS(checkpoints(base))); err != nil {
		p.t.Fatal(err)
	}
}

// byStep gives the losses of steps.
func (l *log) byStep() map[int]float64 {
	all := map[int]float64{}
	for _, e := range l.list {
		if s, ok := e.(event.Step); ok {
			all[s.Step] = float64(s.Loss)
		}
	}
	return all
}

// run makes the steps of a run up to one, with a fault or without.
func (p *post) run(out string, f *fault, steps int, set ...string) *log {
	p.t.Helper()
	l, rows := &log{}, chain{}
	if f != nil {
		rows.poison = f.poisons()
	}
	tr := p.start(out, rows, l, append(set, fmt.Sprintf("steps=%d", steps))...)
	defer tr.Close()
	p.breaks(tr, f)
	if err := tr.Run(p.t.Context()); err != nil {
		p.t.Error(err)
	}
	return l
}

var watchAll = flag.Bool("watch.all", false,
	"with -tags long: every fault over every plan and 2,000 clean steps, not every fourth and 200")

// Faults are found within three steps of what can be seen of them, the right GEMMs of the right
// layer fall back, the run goes on, and its loss returns to the loss of a run without the fault. All
// of its checkpoints are finite.
func TestFaults(t *testing.T) {
	slowtest.Only(t)
	for _, format := range []string{"mxfp8", "nvfp4"} {
		t.Run(format, func(t *testing.T) {
			over(t, format, func(t *testing.T, p *post) { p.faults(format) })
		})
	}
}

// faults makes the runs of a format: one without a fault, and one with each.
func (p *post) faults(format string) {
	base, healthy := p.t.TempDir(), p.t.TempDir()
	p.run(base, nil, trained)
	p.from(base, healthy)
	clean := p.run(healthy, nil, trained+after).byStep()
	every := 4
	if p.plan != nil { // an outlier, and scales that were not made so
		every = 11
	}
	for i, f := range faults(format) {
		if !*watchAll && i%every != 0 {
			continue
		}
		p.t.Run(f.name+" "+f.site, func(t *testing.T) {
			p, out := *p, t.TempDir()
			p.t = t
			p.from(base, out)
			l := p.run(out, &f, trained+after, "save.every=1")
			f.judge(t, l)
			p.finite(out)
			got, want, losses := 0.0, 0.0, l.byStep()
			for step := trained + after - compared + 1; step <= trained+after; step++ {
				got, want = got+losses[step], want+clean[step]
			}
			if off := got/want - 1; !(math.Abs(off) <= backWithin) {
				t.Errorf("the last losses are off by %.2f %%", 100*off)
			} else {
				t.Logf("the last losses are off by %+.2f %%", 100*off)
			}
		})
	}
}

// A run that is stopped while products fall and return, and resumed, ends with the same bits.
func TestFallsResumeExactly(t *testing.T) {
	slowtest.Only(t)
	over(t, "mxfp8", fallsResumeExactly)
}

func fallsResumeExactly(t *testing.T, p *post) {
	base := t.TempDir()
	p.run(base, nil, trained)
	whole, cut := t.TempDir(), t.TempDir()
	f := faults("mxfp8")[0]
	p.from(base, whole)
	p.from(base, cut)
	want := p.run(whole, &f, trained+after)
	got := &log{}
	// One strange sample, bf16 in the place of all, the new policy, the wait for the old one.
	for _, k := range []int{3, 6, 14, 19, after} {
		p.until = trained + k
		got.list = append(got.list, p.run(cut, &f, trained+after).list...)
	}
	for step, x := range want.byStep() {
		if y := got.byStep()[step]; x != y {
			t.Errorf("step %d: loss %v, not %v", step, y, x)
		}
	}
	r := &rig{t: t}
	r.same(r.tensors(checkpoints(whole)), r.tensors(checkpoints(cut)))
}
