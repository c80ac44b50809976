// Command monitor times training steps whose programs report on their quantized GEMMs against
// the same steps without reports, and against steps that are inspected, in turns in one run: what
// the monitors cost.
package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/stat"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/precision/monitor"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/step"
	"github.com/deepwell/deepwell/train"
)

const config = `{"model_type": "llama", "vocab_size": 1024, "hidden_size": 256,
"intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 4,
"num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
"rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": false}`

func main() {
	format := flag.String("precision", "mxfp8", "mxfp8 or nvfp4")
	rows := flag.Int("batch", 8, "rows of a step, of 256 tokens each")
	turns := flag.Int("turns", 10, "how often each is timed")
	each := flag.Int("steps", 5, "steps of a turn")
	cache := flag.String("cache", "", "folder of the compile cache")
	flag.Parse()
	if err := run(context.Background(), *format, *rows, *turns, *each, *cache); err != nil {
		fmt.Fprintln(os.Stderr, "monitor:", err)
		os.Exit(1)
	}
}

// A side is one of the three runs.
type side struct {
	name    string
	trainer *train.Trainer
	steps   []float64 // seconds by the clock
	busy    []float64 // seconds of processors, the mean of a turn
}

// Emit takes the times of steps.
func (s *side) Emit(e event.Event) {
	if step, ok := e.(event.Step); ok {
		s.steps = append(s.steps, step.Seconds)
	}
	if p, ok := e.(event.Precision); ok {
		fmt.Println(s.name, p.Text)
	}
}

func run(ctx context.Context, format string, rows, turns, each int, cache string) error {
	e, err := engine.Open(ctx, "cpu", engine.Options{Devices: 1, Cache: cache})
	if err != nil {
		return err
	}
	defer e.Close()
	dir, err := os.MkdirTemp("", "monitor")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	sides := []*side{{name: "with"}, {name: "without"}, {name: "inspected"}}
	for _, s := range sides {
		total := (turns + 1) * each
		s.trainer, err = begin(ctx, e, filepath.Join(dir, s.name), format, rows, total, s)
		if err != nil {
			return err
		}
		defer s.trainer.Close()
	}
	for turn := range turns + 1 { // the first one warms up
		for i := range sides {
			s := sides[(i+turn)%len(sides)]
			before := cpu()
			for range each {
				if _, err := s.trainer.Step(ctx); err != nil {
					return err
				}
			}
			s.busy = append(s.busy, (cpu()-before)/float64(each))
		}
	}
	fmt.Printf("%s, %d tokens a step, %d turns of %d steps\n", format, 256*rows, turns, each)
	for _, s := range sides {
		fmt.Printf("%-9s %6.1f ms by the clock, %6.1f ms of processors, medians\n", s.name,
			1e3*stat.Median(s.steps[each:]), 1e3*stat.Median(s.busy[1:]))
	}
	clock := func(s *side) []float64 { return s.steps[each:] }
	busy := func(s *side) []float64 { return s.busy[1:] }
	percent := func(what string, a, b *side, over int) {
		fmt.Printf("%-22s %+6.2f %% by the clock, %+6.2f %% of processors\n", what,
			100*(ratio(a, b, clock)-1)/float64(over), 100*(ratio(a, b, busy)-1)/float64(over))
	}
	percent("reports", sides[0], sides[1], 1)
	percent("an inspection", sides[2], sides[0], 1)
	every := monitor.Defaults().Inspect
	percent(fmt.Sprintf("one in %d steps", every), sides[2], sides[0], every)
	return nil
}

// ratio is the median ratio of neighbours in time.
func ratio(a, b *side, of func(*side) []float64) float64 {
	var list []float64
	other := of(b)
	for i, x := range of(a) {
		list = append(list, x/other[i])
	}
	return stat.Median(list)
}

// begin makes a run; the side without monitors has programs without their results, and only the one
// that is inspected is, in every step.
func begin(ctx context.Context, e *engine.Engine, out, format string, rows, steps int,
	s *side) (*train.Trainer, error) {
	c, err := model.Parse([]byte(config))
	if err != nil {
		return nil, err
	}
	text := "model = \"config.json\"\nseq = 256\n[data]\nsources = [\"none\"]\n[save]\nevery = 0\n"
	r, err := recipe.Parse([]byte(text), filepath.Join(out, "run.toml"), []string{"out=" + out,
		"precision=" + format, "batch=" + strconv.Itoa(rows), "steps=" + strconv.Itoa(steps)}, os.Getenv)
	if err != nil {
		return nil, err
	}
	p, err := step.Build(step.Spec{Model: c, Recipe: r, Arch: "cpu"})
	if err != nil {
		return nil, err
	}
	if s.name == "without" {
		err = cmp.Or(strip(p.Find(step.Gradient, 0)), strip(p.Find(step.Update, 0)))
		if err != nil {
			return nil, err
		}
	}
	times := monitor.Defaults()
	if times.Inspect = 0; s.name == "inspected" {
		// Every step, and nothing that it says is compared with steps in which the model moves fast: a
		// product that falls back would be computed in other programs.
		times.Settle, times.Inspect, times.Learn = 0, 1, steps+1
	}
	return train.New(ctx, train.Options{Monitor: &times,
		Engine: e, Model: c, Recipe: r, Programs: p,
		Data: words{int(c.Vocab)}, Events: s, Now: time.Now,
		Init: func(q *model.Param, dst []float32) error { return c.Init(q, 1, dst) }})
}

// strip writes a program again without the results that report; the compiler drops what only they
// need.
func strip(p *step.Program) error {
	g := p.Graph
	all := g.Results
	g.Results = slices.DeleteFunc(slices.Clone(all), func(v *ir.Value) bool {
		return v.Means.Role == program.Stat
	})
	s, err := lower.Module(p.Module.Name, g, lower.Options{Kernels: kernels.For("cpu")})
	g.Results = all
	if err != nil {
		return err
	}
	s.Flags, p.Module = p.Module.Flags, s
	return nil
}

// words are random.
type words struct{ vocab int }

func (w words) Take(_ context.Context, at data.Position, rows, _, _ int) (*data.Batch,
	data.Position, error) {
	const seq = 256
	b := &data.Batch{Sequences: rows, Seq: seq, Count: int64(rows * seq), Total: int64(rows * seq)}
	rnd := rand.New(rand.NewPCG(3, uint64(at["step"])))
	for i := range rows * seq {
		b.IDs, b.Labels = append(b.IDs, rnd.Int32N(int32(w.vocab))), append(b.Labels, 7)
		b.Positions, b.Segments = append(b.Positions, int32(i%seq)), append(b.Segments, 0)
	}
	return b, data.Position{"step": at["step"] + 1}, nil
}

// cpu is what all threads of the process have used of processors, in seconds.
func cpu() float64 {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}
