package train_test

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/train"
	"github.com/deepwell/deepwell/watch"
)

const watched = `{"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128,
"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
"max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
"tie_word_embeddings": false}`

// sites are the linear layers whose products are in few bits, and where faults are.
var sites = []string{"block.q.0", "block.down.0", "block.q.1", "block.down.1"}

// chain is text in which two words of three follow from the one before and the third is anything,
// so that a model that has learned it all still has a loss, and batches differ.
type chain struct {
	seq, vocab int
	poison     map[int64]func(*data.Batch) // by step, counted from 1
}

func (c chain) Take(at data.Position, rows, _, _ int) (*data.Batch, data.Position, error) {
	b := &data.Batch{Rows: rows, Seq: c.seq}
	first := at["row"]
	for row := range int64(rows) {
		rnd := rand.New(rand.NewPCG(1, uint64(first+row)))
		word := rnd.IntN(c.vocab)
		for i := range c.seq {
			b.IDs = append(b.IDs, int32(word))
			if word = (5*word + 3) % c.vocab; rnd.IntN(3) == 0 {
				word = rnd.IntN(c.vocab)
			}
			b.Labels, b.Count = append(b.Labels, int32(word)), b.Count+1
			b.Positions, b.Segments = append(b.Positions, int32(i)), append(b.Segments, 0)
		}
	}
	b.Total = b.Count
	if p := c.poison[first/int64(rows)+1]; p != nil {
		p(b)
	}
	return b, data.Position{"row": first + int64(rows)}, nil
}

// A post is where runs are watched: a small model on one device.
type post struct {
	t      *testing.T
	engine *engine.Engine
	config *model.Config
	format string
}

func newPost(t *testing.T, e *engine.Engine, format string) *post {
	t.Helper()
	c, err := model.Parse([]byte(watched))
	if err != nil {
		t.Fatal(err)
	}
	return &post{t, e, c, format}
}

// policy has few products in few bits, since a CPU's compiler takes long for each.
func (p *post) policy() *precision.Policy {
	return &precision.Policy{Layers: 2, Rules: []precision.Rule{{Linears: []string{"q", "down"}, To: 2,
		Format: precision.Format(p.format), Why: "a test"}}}
}

type compiles struct{}

func (compiles) Emit(e event.Event) {
	if c, ok := e.(event.Compiled); ok && !c.Cached {
		fmt.Println(time.Now().Format("15:04:05"), "compiled", c.Stage, c.Seconds)
	}
}

func openCPU(t *testing.T, devices int) *engine.Engine {
	t.Helper()
	e, err := engine.Open(context.Background(), "cpu", engine.Options{Devices: devices,
		Events: compiles{}, Cache: cmp.Or(os.Getenv("WATCH_CACHE"), cache)})
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	t.Cleanup(e.Close)
	return e
}

// quick are the times of a watch over a run of two hundred steps.
var quick = watch.Options{Settle: 30, Learn: 8, Hold: 12, Healthy: 4}

func (p *post) start(out string, rows chain, events event.Sink, set ...string) *train.Trainer {
	p.t.Helper()
	const text = `
model = "config.json"
steps = 60
batch = 4
seq = 32
[optimizer]
rate = 3e-3
warmup = 10
schedule = "constant"
[data]
sources = ["none"]
[save]
every = 0
keep = 0
`
	set = append([]string{"out=" + out, "precision=" + p.format}, set...)
	rec, err := recipe.Parse([]byte(text), filepath.Join(out, "run.toml"), set, os.Getenv)
	if err != nil {
		p.t.Fatal(err)
	}
	programs, err := train.WriteFaulty(p.config, rec, p.policy(), sites...)
	if err != nil {
		p.t.Fatal(err)
	}
	rows.seq, rows.vocab = rec.Seq, int(p.config.Vocab)
	tr, err := train.New(p.t.Context(), train.Options{Engine: p.engine, Config: p.config, Recipe: rec,
		Programs: programs, Data: rows, Events: events, Now: time.Now, Watch: &quick,
		Init: func(q *model.Param, dst []float32) error { return model.Init(p.config, q, 3, dst) }})
	if err != nil {
		p.t.Fatal(err)
	}
	return tr
}

// A fault is something that goes wrong in a run after its trained steps.
type fault struct {
	name  string
	site  string // the weight of a linear layer
	kind  string
	level func(k int) float64 // of its k-th step, counted from 1
	steps int
}

// trained is how many steps a model makes before something goes wrong, and after how many follow.
const trained, after = 160, 48

func grows(k int) float64 { return math.Pow(10, float64(k)/2) }

func times(level float64) func(int) float64 { return func(int) float64 { return level } }

func faults() []fault {
	return []fault{
		{"outlier", "block.down.1", "outlier", grows, 8},
		{"outlier", "block.down.0", "outlier", grows, 8},
		{"outlier", "block.q.1", "outlier", grows, 8},
		{"underflow 1e-3", "block.down.1", "gradient", times(1e-3), 6},
		{"underflow 1e-6", "block.q.0", "gradient", times(1e-6), 6},
		{"underflow 1e-20", "block.down.0", "gradient", times(1e-20), 6},
		{"underflow 1e-38", "block.down.1", "gradient", times(1e-38), 6},
		{"channels", "block.down.1", "channels", grows, 8},
		{"channels", "block.q.0", "channels", grows, 8},
		{"nan x", "block.down.0", "nan x", times(1), 1},
		{"nan x", "block.q.1", "nan x", times(1), 3},
		{"nan dy", "block.down.1", "nan dy", times(1), 1},
		{"nan dy", "block.q.0", "nan dy", times(1), 3},
		{"nan dw", "block.down.1", "nan dw", times(1), 1},
		{"nan dw", "block.q.0", "nan dw", times(1), 2},
		{"nan dw", "block.gate.0", "nan dw", times(1), 1},
		{"labels", "", "labels", times(1), 1},
		{"ids", "", "ids", times(1), 2},
		{"repeats", "", "repeats", times(1), 1},
		{"scale x2^64", "block.down.1", "flip", times(6), 1},
		{"scale low bit", "block.q.0", "flip", times(0), 1},
		{"scale bit 3", "block.down.0", "flip", times(3), 1},
		{"scale bit 5, wT", "block.q.1", "flipT", times(5), 1},
		{"master", "block.down.1", "master", times(1), 1},
	}
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
func (p *post) breaks(tr *train.Trainer, f *fault) {
	fill := func(name string, value func(i int) float64) error {
		return tr.Change(name, func(b []byte) {
			for i := range len(b) / 4 {
				binary.LittleEndian.PutUint32(b[4*i:], math.Float32bits(float32(value(i))))
			}
		})
	}
	one := func(int) float64 { return 1 }
	set := false
	tr.Break(func(step int) error {
		if !set {
			set = true
			for _, site := range sites {
				if err := cmp.Or(fill(train.FaultX+site, one), fill(train.FaultDY+site, one)); err != nil {
					return err
				}
			}
		}
		k := step - trained
		if f == nil || k < 1 || k > f.steps+1 {
			return nil
		}
		over := k > f.steps
		return f.before(tr, fill, over, f.level(k))
	}, func(step int) error {
		if k := step - trained; f != nil && f.kind == "nan dw" && k >= 1 && k <= f.steps {
			return tr.Change("g."+f.site, func(b []byte) { binary.LittleEndian.PutUint32(b[4*77:], 0x7fc00000) })
		}
		return nil
	})
}

// before does what goes wrong before a step, or ends it.
func (f *fault) before(tr *train.Trainer, fill func(string, func(int) float64) error, over bool,
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
		return fill(train.FaultX+f.site, only(level, func(i int) bool { return i%in == 5 }))
	case "nan x":
		return fill(train.FaultX+f.site, only(math.NaN(), place))
	case "gradient": // all of it
		return fill(train.FaultDY+f.site, only(math.Sqrt(level), func(int) bool { return true }))
	case "channels": // one of 32
		return fill(train.FaultDY+f.site, only(math.Sqrt(level), func(i int) bool { return i%32 == 5 }))
	case "nan dy":
		return fill(train.FaultDY+f.site, only(1e38, place))
	case "flip", "flipT":
		for n, c := range tr.Programs.Step.Copies() {
			if c.Param == f.site && !over && (n%2 == 1) == (f.kind == "flipT") {
				return tr.Change(c.Names[1], func(b []byte) { b[7] ^= 1 << int(level) })
			}
		}
	case "master":
		if !over {
			return tr.Change(f.site, func(b []byte) { b[4*33+3] ^= 1 << 5 })
		}
	}
	return nil
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
			all[s.Step] = s.Loss
		}
	}
	return all
}

func TestFaults(t *testing.T) {
	e := openCPU(t, 1)
	for _, format := range []string{"mxfp8", "nvfp4"} {
		t.Run(format, func(t *testing.T) {
			p, base := newPost(t, e, format), t.TempDir()
			run := func(out string, f *fault, steps int, set ...string) *log {
				l, rows := &log{}, chain{}
				if f != nil {
					rows.poison = f.poisons()
				}
				tr := p.start(out, rows, l, append(set, fmt.Sprintf("steps=%d", steps))...)
				defer tr.Close()
				p.breaks(tr, f)
				if err := tr.Run(t.Context()); err != nil {
					t.Error(err)
				}
				return l
			}
			run(base, nil, trained)
			out := t.TempDir()
			p.from(base, out)
			clean := run(out, nil, trained+after).byStep()
			fmt.Println(time.Now().Format("15:04:05"), "clean", clean[trained+after])
			for _, f := range faults() {
				t.Run(f.name+"/"+f.site, func(t *testing.T) {
					p.t = t
					out := t.TempDir()
					p.from(base, out)
					l := run(out, &f, trained+after, "save.every=1")
					got := l.byStep()
					mean, want := 0.0, 0.0
					for step := trained + after - 12; step <= trained+after; step++ {
						mean, want = mean+got[step], want+clean[step]
					}
					for _, e := range l.list {
						switch e := e.(type) {
						case event.Precision:
							t.Log(e.Text)
						case event.Rejected:
							t.Log("rejected ", e.Step, e.Loss, e.GradNorm, e.Why)
						}
					}
					for k := range 20 {
						if x, ok := got[trained+k+1]; ok {
							t.Logf("%d: %.4f %+.1f %%", trained+k+1, x, 100*(x/clean[trained+k+1]-1))
						}
					}
					t.Logf("last losses off by %+.2f %%", 100*(mean/want-1))
				})
			}
		})
	}
}

func TestWatchedRun(t *testing.T) {
	e := openCPU(t, 1)
	for _, format := range []string{"mxfp8", "nvfp4"} {
		t.Run(format, func(t *testing.T) {
			p, l := newPost(t, e, format), &log{}
			begin := time.Now()
			tr := p.start(t.TempDir(), chain{}, l, "steps=160")
			p.breaks(tr, nil)
			t.Log("compiled", time.Since(begin))
			defer tr.Close()
			if err := tr.Run(t.Context()); err != nil {
				t.Fatal(err)
			}
			t.Log("ran", time.Since(begin), l.losses())
			for _, e := range l.list {
				if _, ok := e.(event.Step); !ok {
					t.Logf("%T %v", e, e)
				}
			}
			for _, l := range tr.Sample().Linears {
				t.Logf("%+v", l)
			}
		})
	}
}
