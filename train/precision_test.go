package train

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/precision/monitor"
	"github.com/deepwell/deepwell/recipe"
)

const watched = `{"model_type": "llama", "vocab_size": 64, "hidden_size": 64,
"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
"rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": false}`

// sites are the quantized linear layers, where faults are injected.
var sites = []string{"block.q.0", "block.down.0", "block.q.1", "block.down.1"}

// chain is text in which two words of three follow from the one before and the third is anything,
// so that a model that has learned it all still has a loss, and batches differ.
type chain struct {
	seq, vocab int
	poison     map[int64]func(*data.Batch) // by step, counted from 1
}

func (c chain) Take(_ context.Context, at data.Position, rows, _, _ int) (*data.Batch,
	data.Position, error) {
	b := &data.Batch{Sequences: rows, Seq: c.seq}
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
	policy *precision.Policy
	watch  *monitor.Options
	until  int
	plan   *plan.Plan
	set    []string // of the recipe, for the plan
	sites  []string // where there may be faults
}

// newPost quantizes some linear layers; a CPU's compiler takes long for each.
func newPost(t *testing.T, e *engine.Engine, format string, linears ...string) *post {
	t.Helper()
	c, err := model.Parse([]byte(watched))
	if err != nil {
		t.Fatal(err)
	}
	return &post{t: t, engine: e, config: c, watch: &quick, sites: sites,
		policy: &precision.Policy{Layers: 2, Rules: []precision.Rule{{Linears: linears, To: 2,
			Format: dtype.Format(format), Why: "a test"}}}}
}

// over calls a test for one device and for two pipeline stages with the parameters of each over two
// devices; with -watch.all for two stages of one device as well. In NVFP4, whose programs a CPU's
// compiler takes longest for, stages are for -watch.all.
func over(t *testing.T, format string, test func(t *testing.T, p *post)) {
	t.Helper()
	e := openCPU(t, 4)
	for _, row := range []struct {
		name       string
		size, fsdp int64
	}{{"one device", 1, 1}, {"stages fsdp", 2, 2}, {"stages", 2, 1}} {
		if !*watchAll && (row.name == "stages" || row.size > 1 && format == "nvfp4") {
			continue
		}
		t.Run(row.name, func(t *testing.T) {
			p := newPost(t, e, format, "q", "down")
			if row.size > 1 {
				p.plan, p.set = plan.Default(), []string{"microbatch=2"}
				p.plan.Seq, p.plan.Batch, p.plan.Microbatches = 32, 4, 2
				p.plan.PP = plan.PP{Size: row.size, Schedule: "1f1b"}
				p.plan.FSDP = plan.FSDP{Size: row.fsdp, Zero: 3, Gather: "layer"}
				p.plan.Cluster = fmt.Sprintf("%dxcpu", row.size*row.fsdp)
				p.plan.Precision, p.plan.Types.Params = format, dtype.BF16
			}
			test(t, p)
		})
	}
}

func openCPU(t *testing.T, devices int) *engine.Engine {
	t.Helper()
	e, err := engine.Open(context.Background(), "cpu", engine.Options{Devices: devices, Cache: cache})
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	t.Cleanup(e.Close)
	return e
}

// quick are the times of a watch over a run of two hundred steps.
var quick = monitor.Options{Settle: 30, Learn: 8, Hold: 12, Healthy: 4}

func (p *post) start(out string, rows chain, events event.Sink, set ...string) *Trainer {
	p.t.Helper()
	const text = `
model = "config.json"
steps = 60
batch = 4
seq = 32
[optimizer]
lr = 3e-3
warmup = 10
schedule = "constant"
[data]
sources = ["none"]
[save]
every = 0
keep = 0
`
	set = slices.Concat([]string{"out=" + out, "precision=" + string(p.policy.Rules[0].Format)},
		p.set, set)
	rec, err := recipe.Parse([]byte(text), filepath.Join(out, "run.toml"), set, os.Getenv)
	if err != nil {
		p.t.Fatal(err)
	}
	programs, err := buildFaulty(p.config, rec, p.plan, p.policy, p.sites...)
	if err != nil {
		p.t.Fatal(err)
	}
	rows.seq, rows.vocab = rec.Seq, int(p.config.Vocab)
	tr, err := New(p.t.Context(), Options{Engine: p.engine, Model: p.config, Recipe: rec,
		Programs: programs, Data: rows, Events: events, Now: time.Now, Monitor: p.watch, Until: p.until,
		Init: func(q *model.Param, dst []float32) error { return p.config.Init(q, 3, dst) }})
	if err != nil {
		p.t.Fatal(err)
	}
	return tr
}

// What programs report is what can be read of their arrays. A clean run raises no alarm; a step
// with a scale that was not made so changes nothing, and everything is computed in bf16 after it.
func TestReports(t *testing.T) {
	const site, steps = "block.down.0", 64
	p, l := newPost(t, openCPU(t, 1), "mxfp8", "down"), &log{}
	p.config.Layers, p.policy.Layers, p.policy.Rules[0].To, p.sites = 1, 1, 1, []string{site}
	f := &fault{site: site, kind: "w"}
	tr := p.start(t.TempDir(), chain{}, l, fmt.Sprintf("steps=%d", steps))
	defer tr.Close()
	var norm, sum, grown float64
	tr.intercept(func(step int) error {
		switch step {
		case 50: // all that goes in is twice itself
			grown = down(tr).Operands[0].Amax
			return tr.change(faultX+site, func(b []byte) { repeat(b, 2) })
		case 51:
			grown = down(tr).Operands[0].Amax / grown
			return tr.change(faultX+site, func(b []byte) { repeat(b, 1) })
		case 60:
			return tr.change(f.scales(tr), func(b []byte) { b[9] ^= 1 })
		}
		return nil
	}, func(step int) error {
		switch step {
		case 55:
			err := tr.change("g."+site, func(b []byte) { norm = frobeniusOf(b) })
			if err != nil {
				return err
			}
			err = tr.change(f.scales(tr), func(b []byte) {
				for _, x := range b {
					sum += float64(x)
				}
			})
			if got := float64(uint32(down(tr).Operands[1].Used)); got != sum {
				t.Errorf("scales add up to %v, not %v", got, sum)
			}
			return err
		case 56:
			if got := down(tr).Norm; !(math.Abs(got/norm-1) < 1e-5) { // sums in another order
				t.Errorf("the norm of the gradient is %v, not %v", got, norm)
			}
		}
		return nil
	})
	if err := tr.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if grown < 1 || grown > 4 { // twice, and another batch may have a scale more or less
		t.Errorf("amax of x grew %v-fold, not twofold", grown)
	}
	if d := down(tr); d.Fprop != "bf16" || d.Norm <= 0 {
		t.Errorf("after a scale was changed: %+v", d)
	}
	if list := l.rejected(); len(list) != 1 || list[0].Step != 60 {
		t.Errorf("rejected: %v", list)
	}
	var all []string
	for _, e := range l.list {
		if e, ok := e.(event.Precision); ok {
			all = append(all, fmt.Sprintf("%d %s %d %s %s %s", e.Step, e.What,
				e.Layer, e.Linear, e.Product, e.Signal))
		}
	}
	want := []string{"60 refuse 0 down  w scales", "60 fall 0 down fprop w scales"}
	if !slices.Equal(all, want) {
		t.Errorf("decisions %q, want %q", all, want)
	}
}

// down gives what was reported of the last linear layer.
func down(tr *Trainer) monitor.Linear {
	list := tr.sample().Linears
	return list[len(list)-1]
}

func repeat(b []byte, x float32) {
	for i := 0; i < len(b); i += 4 {
		binary.LittleEndian.PutUint32(b[i:], math.Float32bits(x))
	}
}

func frobeniusOf(b []byte) float64 {
	sum := 0.0
	for i := 0; i < len(b); i += 4 {
		x := float64(math.Float32frombits(binary.LittleEndian.Uint32(b[i:])))
		sum += x * x
	}
	return math.Sqrt(sum)
}

// Loops over layers and devices that share a model are watched as well: a scale that is changed is
// found in its layer.
func TestLoopsAreWatched(t *testing.T) {
	slowtest.Only(t)
	e := openCPU(t, 2)
	spread := plan.Default()
	spread.Seq, spread.Batch, spread.Cluster, spread.FSDP.Size = 32, 4, "2xcpu", 2
	spread.Precision, spread.Types.Params = "mxfp8", dtype.BF16
	for name, set := range map[string][]string{"loop": {"recompute=full"}, "fsdp": nil} {
		t.Run(name, func(t *testing.T) {
			p, l := newPost(t, e, "mxfp8", "q", "down"), &log{}
			if p.sites = nil; set == nil {
				p.plan = spread
			}
			tr := p.start(t.TempDir(), chain{}, l, append(set, "steps=24")...)
			defer tr.Close()
			if name == "loop" { // what is on one device can be changed
				f := &fault{site: "block.down.1", kind: "w"}
				tr.intercept(func(k int) error {
					if k == 20 {
						return tr.change(f.scales(tr), func(b []byte) { b[len(b)-7] ^= 1 })
					}
					return nil
				}, func(int) error { return nil })
			}
			if err := tr.Run(t.Context()); err != nil {
				t.Fatal(err)
			}
			found := 0
			for _, e := range l.list {
				if e, ok := e.(event.Precision); ok {
					t.Log(e.Text)
					if found++; e.Layer != 1 || e.Linear != "down" || e.Step != 20 {
						t.Error("that was not the fault")
					}
				}
			}
			if name == "loop" && found == 0 {
				t.Error("nothing was found")
			}
			for _, one := range tr.sample().Linears {
				for _, o := range one.Operands {
					if w := strings.HasPrefix(o.Name, "w"); w != (o.Made > 0) || o.Made != o.Used {
						t.Errorf("layer %d, %s: %+v", one.Layer, one.Name, o)
					}
				}
			}
		})
	}
}

// A run in which nothing is wrong raises no alarm.
func TestCleanRunsRaiseNoAlarm(t *testing.T) {
	slowtest.Only(t)
	e := openCPU(t, 1)
	for _, format := range []string{"mxfp8", "nvfp4"} {
		t.Run(format, func(t *testing.T) {
			p, l, steps := newPost(t, e, format, "q", "down"), &log{}, 200
			if *watchAll {
				steps = 2000
			}
			if format == "nvfp4" { // the last layer is in bf16
				p.config.Layers = 3
			}
			all, err := precision.Default(p.config, format)
			if err != nil {
				t.Fatal(err)
			}
			p.policy.Layers, p.policy.Rules = all.Layers, append(p.policy.Rules[:1], all.Rules...)
			tr := p.start(t.TempDir(), chain{}, l, "steps="+strconv.Itoa(steps), "optimizer.schedule=cosine")
			defer tr.Close()
			p.breaks(tr, nil)
			if err := tr.Run(t.Context()); err != nil {
				t.Fatal(err)
			}
			l.noAlarms(t)
			losses := l.losses()
			t.Logf("%d steps, the loss went from %.3f to %.3f", len(losses), losses[0],
				losses[len(losses)-1])
		})
	}
}
