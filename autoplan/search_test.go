package autoplan

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/price"
)

// jobFor is a job for a preset.
func jobFor(t testing.TB, name, cluster string, seq, tokens int64) Job {
	t.Helper()
	preset, err := model.Find(name)
	if err != nil {
		t.Fatal(err)
	}
	cl, err := machine.ParseCluster(cluster)
	if err != nil {
		t.Fatal(err)
	}
	prof, err := price.Find("deepwell")
	if err != nil {
		t.Fatal(err)
	}
	return Job{Model: name, Config: preset.Config, Cluster: cl, Profile: prof, Seq: seq, Batch: tokens / seq}
}

// spent is the processor time of this process: other work on the machine does not count.
func spent(t testing.TB) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func show(t *testing.T, r *Result, wall, cpu time.Duration) {
	t.Logf("%d plans, %d priced in %v, %v of processors: %.0f plans a second on two", r.Space, r.Priced, wall.Round(time.Millisecond),
		cpu.Round(time.Millisecond), 2*float64(r.Priced)/cpu.Seconds())
	for i, c := range r.Choices {
		p := c.Plan
		t.Logf("%d: dp %d fsdp %d/%d/%s tp %d cp %d ep %d pp %d×%d %s m %d b %d %v  %.3f s %.0f tok/s %.1f GiB bubble %.1f %%  %s", i+1,
			p.DP, p.FSDP.Size, p.FSDP.Zero, p.FSDP.Gather, p.TP.Size, p.CP.Size, p.EP, p.PP.Size, p.PP.Virtual, p.PP.Schedule, p.Microbatches,
			p.Batch, p.Recompute, c.Step, c.Rate, float64(c.Peak)/(1<<30), 100*c.Bubble, c.Why)
	}
}

// cores is what the issue gives its times for.
const cores = 2

// Searches of models on their natural clusters end in time, with plans that fit and have little
// bubble.
func TestKnownModels(t *testing.T) {
	for _, c := range []struct {
		model, cluster string
		seq, tokens    int64
		seconds        float64 // on two cores, from issue 6, or what is comfortable
		short, long    bool
	}{
		{"llama3.1-8b", "8xb200", 8192, 1 << 20, 1, true, false},
		{"llama3.1-70b", "64xgb200", 8192, 4 << 20, 1, true, false},
		{"llama3.1-405b", "1024xgb200", 8192, 16 << 20, 3, false, true},
		{"mixtral-8x7b", "8xb200", 4096, 1 << 20, 1, false, false},
		{"qwen3-235b-a22b", "64xgb200", 4096, 4 << 20, 2, false, true},
		{"deepseek-v3", "1024xgb200", 4096, 64 << 20, 1, false, false},
		{"llama3.1-405b", "100000xgb200", 8192, 0, 10, false, true},
	} {
		t.Run(fmt.Sprintf("%s-%s", c.model, c.cluster), func(t *testing.T) {
			if testing.Short() && !c.short {
				t.Skip("takes time")
			}
			if c.long {
				slowtest.Only(t)
			}
			j := jobFor(t, c.model, c.cluster, c.seq, c.tokens)
			start, before := time.Now(), spent(t)
			r, err := Search(t.Context(), j)
			if err != nil {
				t.Fatal(err)
			}
			cpu := spent(t) - before
			show(t, r, time.Since(start), cpu)
			// The detector of races makes everything ten times as slow.
			if cpu.Seconds() > cores*c.seconds && !slowtest.Raced {
				t.Errorf("%v of processors, more than %v s on %d cores", cpu, c.seconds, cores)
			}
			for i, x := range r.Choices {
				if x.Peak > j.Cluster.GPU.UsableBytes || x.Why == "" || x.Step <= 0 || x.Low > x.Step || x.High < x.Step {
					t.Errorf("plan %d: %+v", i+1, x)
				}
				if c.model[:5] == "llama" && x.Plan.Check(j.Config) != nil {
					t.Errorf("plan %d cannot run: %v", i+1, x.Plan.Check(j.Config))
				}
			}
			if best := r.Choices[0]; best.Bubble >= muchBubble {
				t.Errorf("the best plan has a bubble of %.1f %%", 100*best.Bubble)
			}
		})
	}
}

// However few plans are listed, the first has little bubble if that costs little. With two,
// closed-form candidates near 5 % once crowded the others out. By our own prices since deepseek-v3 is
// priced from its graph, no plan is chosen over a faster one; by Megatron's one still is.
func TestShortListsHaveALowBubble(t *testing.T) {
	slowtest.Only(t)
	if testing.Short() || slowtest.Raced {
		t.Skip("takes time")
	}
	j := jobFor(t, "deepseek-v3", "1024xgb200", 4096, 64<<20)
	var err error
	if j.Profile, err = price.Find("megatron"); err != nil {
		t.Fatal(err)
	}
	for _, j.Top = range []int{1, 2} {
		r, err := Search(t.Context(), j)
		if err != nil {
			t.Fatal(err)
		}
		if best := r.Choices[0]; best.Bubble >= muchBubble || !strings.Contains(best.Why, "chosen over") {
			t.Errorf("of %d: a bubble of %.1f %%, %s", j.Top, 100*best.Bubble, best.Why)
		}
	}
}

// What is pruned cannot be best: pricing every plan of the space finds none better.
func TestPruningIsExact(t *testing.T) {
	slowtest.Only(t)
	if slowtest.Raced {
		t.Skip("one worker prices every plan; there is nothing to race")
	}
	for _, c := range []struct {
		model, cluster string
		goal           Goal
		fixed          Fixed
		capacity       int64
		precision      dtype.Format
	}{
		{"llama3.1-8b", "8xb200", Time, nil, 0, ""},
		{"llama3.1-8b", "8xb200", Time, nil, 60 << 30, ""}, // so little that much must be recomputed
		{"llama3.1-70b", "16xgb200", Time, Fixed{"cp": "1"}, 0, ""},
		{"llama3.1-70b", "16xgb200", Time, Fixed{"cp": "1", "tp": "2"}, 0, dtype.NVFP4},
		{"qwen3-30b-a3b", "8xb200", Time, Fixed{"cp": "1", "tp": "1"}, 0, ""},
		{"llama3.1-8b", "8xb200", Money, Fixed{"cp": "1"}, 0, ""},
		{"llama3.1-8b", "8xb200", Memory, Fixed{"cp": "1"}, 0, ""},
	} {
		t.Run(fmt.Sprintf("%s-%s-%s-%d%s", c.model, c.cluster, c.goal, c.capacity>>30, c.precision), func(t *testing.T) {
			j := jobFor(t, c.model, c.cluster, 4096, 1<<19)
			j.Goal, j.Fixed, j.Capacity, j.Top = c.goal, c.fixed, c.capacity, 3
			if c.precision != "" {
				j.Precisions = []dtype.Format{c.precision}
			}
			j, err := j.filled()
			if err != nil {
				t.Fatal(err)
			}
			s, err := newSearcher(j)
			if err != nil {
				t.Fatal(err)
			}
			found, err := s.run(t.Context())
			if err != nil || len(found) == 0 {
				t.Fatal(found, err)
			}
			want := everyPlan(s)
			if got := found[0]; got.metric > want.metric {
				t.Errorf("found %v, the best of all is %v: %+v", got.metric, want.metric, want)
			}
			t.Logf("%d plans, %d priced", s.space, s.most)
		})
	}
}

// everyPlan prices all plans of the searcher's space and gives the best. It also holds the bounds
// to what they promise.
func everyPlan(s *searcher) candidate {
	w := s.workers[0]
	best := candidate{metric: math.Inf(1)}
	for _, n := range s.meshOptions {
		for _, c := range s.job.shardOptions(n.mesh) {
			for _, o := range s.job.scheduleOptions(n) {
				for v := range s.recomputes {
					x, ok := w.candidate(n, layoutOption{c, o}, v, math.Inf(1))
					if !ok || x.peak > s.job.Capacity || s.beyond(x, math.Inf(1)) {
						continue
					}
					if x.metric < best.metric {
						best = x
					}
				}
			}
		}
	}
	return best
}

// Bounds of a node, and of a variant for all schedules, are below the time of each of their plans,
// recomputing more takes no less, and no family is left out for its memory of which a plan fits.
func TestBoundsHold(t *testing.T) {
	for _, row := range []struct {
		name      string
		precision dtype.Format
		every     int
	}{{"llama3.1-8b", dtype.FormatBF16, 7}, {"qwen3-30b-a3b", dtype.FormatBF16, 7}, {"llama3.1-8b", dtype.NVFP4, 17}} {
		j := jobFor(t, row.name, "16xb200", 4096, 1<<20)
		j.Precisions = []dtype.Format{row.precision}
		j, err := j.filled()
		if err != nil {
			t.Fatal(err)
		}
		s, err := newSearcher(j)
		if err != nil {
			t.Fatal(err)
		}
		s.expand()
		s.job.Capacity = math.MaxInt64 // so that all have a time
		w := s.workers[0]
		for i, n := range s.meshOptions {
			if i%row.every != 0 {
				continue
			}
			for _, c := range s.job.shardOptions(n.mesh) {
				least := make([]float64, len(s.recomputes))
				for v := range least {
					least[v] = w.least(n, c, v)
				}
				for _, o := range s.job.scheduleOptions(n) {
					times, leanest := make([]float64, len(s.recomputes)), int64(math.MaxInt64)
					for v := range s.recomputes {
						x, ok := w.candidate(n, layoutOption{c, o}, v, math.Inf(1))
						if !ok {
							t.Fatalf("%+v has no price: %v", n, w.reason)
						}
						times[v] = x.metric
						if low := max(n.bound, least[v]); x.metric < low*(1-rounding) {
							t.Fatalf("%+v %+v takes %v, less than its bound %v", n, x.layoutOption, x.metric, low)
						}
						if o.name == "1f1b" && x.peak <= j.Capacity && x.metric < n.filled()*(1-rounding) {
							t.Fatalf("%+v %+v takes %v, less than 1F1B's bound %v", n, x.layoutOption, x.metric, n.filled())
						}
						if v > 0 { // of the first it is known before
							leanest = min(leanest, x.peak)
						}
						if x.stays > x.peak {
							t.Fatalf("%+v: what stays is more than the peak", x)
						}
						for u := range v {
							a, b := s.recomputes[u].set, s.recomputes[v].set
							if a&b == a && times[v] < times[u]*(1-rounding) {
								t.Fatalf("%+v: %v takes longer than %v, which does more", x, s.recomputes[u], s.recomputes[v])
							}
						}
					}
					s.job.Capacity = leanest
					if w.exceeds(n, layoutOption{c, o}, math.Inf(1)) {
						t.Fatalf("%+v %+v exceeds %d bytes, in which a plan of it fits", n, o, leanest)
					}
					s.job.Capacity = math.MaxInt64
				}
			}
		}
	}
}

// rounding is for sums of a hundred times in another order.
const rounding = 1e-9

func TestSameInputSameOutput(t *testing.T) {
	j := jobFor(t, "llama3.1-8b", "32xb200", 8192, 2<<20)
	var texts []string
	for range 2 {
		r, err := Search(t.Context(), j)
		if err != nil {
			t.Fatal(err)
		}
		b, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		texts = append(texts, string(b))
	}
	if texts[0] != texts[1] {
		t.Errorf("two searches differ:\n%s\n%s", texts[0], texts[1])
	}
}

func TestFixedIsKept(t *testing.T) {
	j := jobFor(t, "llama3.1-70b", "64xgb200", 8192, 4<<20)
	var err error
	if j.Fixed, err = ParseFixed("tp=4,pp=2,schedule=1f1b,recompute=attn+norm,microbatch=1"); err != nil {
		t.Fatal(err)
	}
	r, err := Search(t.Context(), j)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range r.Choices {
		f := fixedOf(c.Plan)
		if f["tp"] != "4" || f["pp"] != "2" || f["schedule"] != "1f1b" || f["microbatch"] != "1" || len(c.Plan.Recompute) != 2 {
			t.Errorf("%v", f)
		}
	}
	if text := j.Fixed.String(); text != "tp=4,pp=2,schedule=1f1b,microbatch=1,recompute=attn+norm" {
		t.Errorf("%q", text)
	}
	if f, err := ParseFixed("recompute=full"); err != nil || !slices.Equal((&Job{Config: j.Config, Fixed: f}).recomputeOptions()[0].tags, everything(j)) {
		t.Errorf("recompute=full: %v", err)
	}
	for _, bad := range []string{"micro=1", "gather=micro", "tp=1,tp=2", "tp", "tp=0", "tp=x", "gather=all", "foo=2", "zero=1,gather=layer", "gather=microbatch,zero=2", "recompute=all", "offload=params", "schedule=2f2b", "=1"} {
		if _, err := ParseFixed(bad); diag.From(err) == nil || diag.From(err).Code != diag.BadUsage {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// A fixed dp and fsdp are searched, whatever the sizes that a search would try by itself; and so
// is a fixed lifetime of gathered parameters, which only ZeRO 3 has.
func TestFixedShardsAreSearched(t *testing.T) {
	j := jobFor(t, "llama3.1-8b", "8xb200", 8192, 1<<20)
	for _, row := range []struct {
		fixed    Fixed
		dp, fsdp int64
		zero     int
		gather   string
	}{
		{Fixed{"dp": "2", "fsdp": "4"}, 2, 4, 0, ""},
		{Fixed{"fsdp": "2", "tp": "1", "cp": "1", "pp": "1"}, 4, 2, 0, ""},
		{Fixed{"dp": "2", "tp": "1", "cp": "1", "pp": "1"}, 2, 4, 0, ""},
		{Fixed{"dp": "1", "fsdp": "8", "gather": "layer"}, 1, 8, 3, "layer"},
		{Fixed{"dp": "1", "fsdp": "8", "gather": "microbatch"}, 1, 8, 3, "microbatch"},
	} {
		j.Fixed = row.fixed
		r, err := Search(t.Context(), j)
		if err != nil {
			t.Errorf("%s: %v", row.fixed, err)
			continue
		}
		p := r.Choices[0].Plan
		if max(p.DP, 1) != row.dp || p.FSDP.Size != row.fsdp || row.zero > 0 && p.FSDP.Zero != row.zero ||
			row.gather != "" && p.FSDP.Gather != row.gather {
			t.Errorf("%s: dp %d, fsdp %+v", row.fixed, p.DP, p.FSDP)
		}
	}
}

func FuzzParseFixed(f *testing.F) {
	f.Add("tp=4,pp=2,recompute=attn+norm")
	f.Fuzz(func(t *testing.T, text string) {
		fixed, err := ParseFixed(text)
		if err != nil {
			return
		}
		again, err := ParseFixed(fixed.String())
		if err != nil || again.String() != fixed.String() {
			t.Fatalf("%q became %q, %v", text, fixed, err)
		}
	})
}

func TestNothingFits(t *testing.T) {
	for name, c := range map[string]struct {
		model, cluster string
		rows           int64
		fixed          Fixed
		want           string
	}{
		"too few devices": {"llama3.1-405b", "8xb200", 16, nil, "--cluster "},
		"too much fixed":  {"llama3.1-70b", "64xgb200", 512, Fixed{"fsdp": "1", "dp": "64"}, "without --fix"},
		"uneven batch":    {"llama3.1-8b", "8xb200", 7, Fixed{"pp": "1", "tp": "1", "cp": "1"}, "without --fix "},
	} {
		t.Run(name, func(t *testing.T) {
			j := jobFor(t, c.model, c.cluster, 8192, 8192)
			j.Batch, j.Fixed = c.rows, c.fixed
			_, err := Search(t.Context(), j)
			e := diag.From(err)
			if e == nil || e.Code != diag.PlanNoFit || !strings.Contains(e.Fix, c.want) || !strings.Contains(e.Fix, "→") {
				t.Errorf("%v", err)
			}
		})
	}
}

// Goals differ as they should: money leaves devices out that do not pay, memory needs less than
// time.
func TestGoals(t *testing.T) {
	best := map[Goal]Choice{}
	for _, g := range Goals() {
		j := jobFor(t, "llama3.1-8b", "64xb200", 8192, 2<<20)
		j.Goal = g
		r, err := Search(t.Context(), j)
		if err != nil {
			t.Fatal(err)
		}
		best[g] = r.Choices[0]
	}
	if a, b := best[Money].Rate, best[Time].Rate; a < b {
		t.Errorf("money gets %v tokens of a device, time %v", a, b)
	}
	if best[Money].Devices > best[Time].Devices {
		t.Error("money takes more devices than time")
	}
	if a, b := best[Memory], best[Time]; a.Peak > b.Peak || a.Step > b.Step*slowest*Margin {
		t.Errorf("memory has %d bytes and %v s, time %d and %v", a.Peak, a.Step, b.Peak, b.Step)
	}
}

func TestImprove(t *testing.T) {
	j := jobFor(t, "llama3.1-70b", "64xgb200", 8192, 4<<20)
	j.Fixed = Fixed{"recompute": "norm+attn+mlp", "pp": "4", "schedule": "1f1b", "microbatch": "1"}
	r, err := Search(t.Context(), j)
	if err != nil {
		t.Fatal(err)
	}
	poor := r.Choices[0]
	j.Fixed = nil
	list, err := Improve(t.Context(), j, poor.Plan, poor.Step)
	if err != nil || len(list) == 0 {
		t.Fatal(list, err)
	}
	for i, h := range list {
		t.Logf("%.2f s of %.2f: %s", h.Step, poor.Step, h.Change)
		if h.Step >= poor.Step || i > 0 && h.Step < list[i-1].Step {
			t.Errorf("%d: %+v", i, h)
		}
	}
}

// BenchmarkPrice says how many plans one processor prices to the end, drawn from all over the space
// so that little of one serves the next; NVFP4 has layers of two formats. A search has neighbours,
// and leaves off where a bound decides (TestKnownModels tells its rate).
func BenchmarkPrice(b *testing.B) {
	for _, precision := range []dtype.Format{dtype.FormatBF16, dtype.NVFP4} {
		b.Run(string(precision), func(b *testing.B) {
			j := jobFor(b, "llama3.1-405b", "1024xgb200", 8192, 16<<20)
			j.Precisions = []dtype.Format{precision}
			j, err := j.filled()
			if err != nil {
				b.Fatal(err)
			}
			s, err := newSearcher(j)
			if err != nil {
				b.Fatal(err)
			}
			s.expand()
			s.job.Capacity = math.MaxInt64
			w := s.workers[0]
			priced := 0
			for b.Loop() {
				n := s.meshOptions[priced*7919%len(s.meshOptions)]
				cuts, orders := s.job.shardOptions(n.mesh), s.job.scheduleOptions(n)
				f := layoutOption{cuts[priced%len(cuts)], orders[priced%len(orders)]}
				if _, ok := w.candidate(n, f, priced%len(s.recomputes), math.Inf(1)); !ok {
					b.Fatal("no price")
				}
				priced++
			}
			b.ReportMetric(float64(priced)/b.Elapsed().Seconds(), "plans/s")
		})
	}
}

// Numbers of devices with few divisors leave few idle: 1,000 B200 once meant 768 of them, though
// 960 are 17 % faster, and 1,000,000 left 213,568 idle. What is idle is paid for, and a warning.
func TestAlmostNoDeviceIsLeftIdle(t *testing.T) {
	for _, c := range []struct {
		cluster string
		least   int
	}{{"1000xb200", 960}, {"500xb200", 480}, {"1000000xgb200", 980_000}, {"100000xgb200", 98_304}, {"1024xgb200", 1024}} {
		j := jobFor(t, "llama3.1-405b", c.cluster, 8192, 16<<20)
		if list := j.counts(); !slices.ContainsFunc(list, func(n int) bool { return n >= c.least && n < j.Cluster.Count || n == c.least }) ||
			list[0] != j.Cluster.Count || len(list) > 7 {
			t.Errorf("%s: %v are tried", c.cluster, list)
		}
	}
	j := jobFor(t, "llama3.1-405b", "1000xb200", 8192, 16<<20)
	j.Fixed = Fixed{"tp": "8", "cp": "1", "microbatch": "1"}
	r, err := Search(t.Context(), j)
	if err != nil {
		t.Fatal(err)
	}
	best := r.Choices[0]
	if best.Devices < 960 || best.Paid != 1000 {
		t.Errorf("%d devices are used, %d paid for", best.Devices, best.Paid)
	}
	if tokens := best.Rate * 1000 * best.Step; math.Abs(tokens/(16<<20)-1) > 1e-9 {
		t.Errorf("%v tokens a second of each device that is paid for", best.Rate)
	}
	if idle := fmt.Sprintf("%d of 1000 devices are left idle", 1000-best.Devices); len(r.Warnings) == 0 ||
		!strings.Contains(r.Warnings[0].Text, idle) {
		t.Errorf("%+v; want %q", r.Warnings, idle)
	}
}

// Warnings come before figures that should not be taken for granted.
func TestWarnings(t *testing.T) {
	for _, c := range []struct {
		model, cluster string
		seq            int64
		fixed          Fixed
		devices        int
		want           string // the text of one, or none
	}{
		{"llama3.1-8b", "8xb200", 8192, nil, 0, ""},
		{"llama2-7b", "8xb200", 32768, nil, 0, "sequences of 32768 tokens are longer than the model's context of 4096"},
		{"llama3.1-8b", "8xb200", 8192, nil, 7, "1 of 8 devices is left idle"},
		{"deepseek-v3", "576xgb200", 4096, Fixed{"ep": "32", "tp": "1"}, 576, "groups of ep 32 straddle NVLink domains of 72"},
		{"deepseek-v3", "512xgb200", 4096, Fixed{"ep": "32", "tp": "1"}, 512, "taken as 8 domains of 16 hosts"},
	} {
		j := jobFor(t, c.model, c.cluster, c.seq, 0)
		j.Fixed, j.Devices, j.Top = c.fixed, c.devices, 1
		r, err := Search(t.Context(), j)
		if err != nil {
			t.Fatal(c.model, c.cluster, err)
		}
		found := slices.ContainsFunc(r.Warnings, func(w event.Warning) bool { return c.want != "" && strings.Contains(w.Text, c.want) })
		if found != (c.want != "") || c.want == "" && len(r.Warnings) > 0 {
			t.Errorf("%s on %s: %+v, want %q", c.model, c.cluster, r.Warnings, c.want)
		}
	}
}

// No more plans are priced than there are.
func TestPricedPlansAreOfTheSpace(t *testing.T) {
	for _, g := range Goals() {
		for _, cluster := range []string{"1xgb200", "8xb200", "7xb200", "64xb200"} {
			j := jobFor(t, "llama3.1-8b", cluster, 8192, 56<<13)
			j.Goal = g
			r, err := Search(t.Context(), j)
			if err != nil {
				t.Fatal(err)
			}
			if r.Priced > r.Space || r.Priced == 0 {
				t.Errorf("%s for %s: %d priced of %d", cluster, g, r.Priced, r.Space)
			}
		}
	}
}

// Equivalent plans are listed once: k sequences over k cp ranks are as many tokens per device as
// one sequence each. The simplest spelling is listed, and the first of equals.
func TestOnePlanIsListedOnce(t *testing.T) {
	j := jobFor(t, "llama3.1-70b", "64xgb200", 8192, 4<<20)
	j.Precisions = []dtype.Format{dtype.MXFP8}
	var err error
	if j.Profile, err = price.Find("megatron-26.08"); err != nil {
		t.Fatal(err)
	}
	r, err := Search(t.Context(), j)
	if err != nil {
		t.Fatal(err)
	}
	if cp := r.Choices[0].Plan.CP.Size; cp != 1 {
		t.Errorf("the first plan has cp %d", cp)
	}
	seen := map[string]bool{}
	for _, c := range r.Choices {
		p := c.Plan
		key := fmt.Sprint(p.TP.Size, p.PP.Size, p.CP.Size*p.DP*p.FSDP.Size, p.Microbatches)
		if seen[key] {
			t.Errorf("tp %d pp %d cp %d with %d microbatches is listed twice", p.TP.Size, p.PP.Size, p.CP.Size, p.Microbatches)
		}
		seen[key] = true
	}
}

// Money is not saved by noise: half the devices must save a hundredth.
func TestMoneyIsWorthTime(t *testing.T) {
	j := jobFor(t, "llama3.1-70b", "512xb200", 8192, 4<<20)
	j.Goal, j.Fixed = Money, Fixed{"cp": "1", "microbatch": "1"}
	r, err := Search(t.Context(), j)
	if err != nil {
		t.Fatal(err)
	}
	best := r.Choices[0]
	for _, c := range r.Choices {
		if worth := math.Pow(halved, math.Log2(float64(c.Devices)/float64(best.Devices))); c.Devices > best.Devices && c.Rate*worth > best.Rate {
			t.Errorf("%d devices at %.0f tokens a second are put before %d at %.0f", best.Devices, best.Rate, c.Devices, c.Rate)
		}
	}
}

// The cause of a search that finds nothing is the size that is wrong, and the leanest plan is lean.
func TestCausesAreRight(t *testing.T) {
	for _, row := range []struct {
		model, cluster string
		fixed          Fixed
		want           string
	}{
		{"llama3.1-70b", "64xgb200", Fixed{"tp": "3"}, "64 heads, 8 KV heads and an MLP of 28672 cannot be sharded over tp 3"},
		{"llama3.1-70b", "64xgb200", Fixed{"pp": "7"}, "pp 7 does not divide 64 devices"},
		{"llama3.1-8b", "64xgb200", Fixed{"pp": "64"}, "32 layers cannot be split into 64 stages"},
		{"gemma2-9b", "8xb200", Fixed{"cp": "2", "cp.kind": "gather"}, "would write its scores to memory"},
		{"llama3.1-8b", "8xb200", Fixed{"tp": "1", "cp": "1", "pp": "1", "dp": "2", "fsdp": "2"}, "no mesh of 8 devices that deepwell can shard has tp=1,cp=1,pp=1,dp=2,fsdp=2"},
		{"llama3.1-8b", "8xb200", Fixed{"dp": "8", "microbatch": "128"}, "a batch of 512 sequences does not divide over 8 data-parallel ranks in microbatches of 128"},
		{"llama3.1-8b", "8xb200", Fixed{"pp": "2", "schedule": "1f1b", "virtual": "2"}, "no pipeline schedule has pp=2,virtual=2,schedule=1f1b"},
		{"llama3.1-70b", "8xrtx6000pro", nil, "the plan with the lowest memory needs 1"}, // not 407 GiB
	} {
		j := jobFor(t, row.model, row.cluster, 8192, 4<<20)
		j.Fixed = row.fixed
		s, err := newSearcher(must(j.filled()))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.run(t.Context()); err != nil {
			t.Fatal(err)
		}
		s.lean(t.Context())
		if text := s.why().Format(); !strings.Contains(text, row.want) {
			t.Errorf("%s %v: %s; want %q", row.model, row.fixed, text, row.want)
		}
	}
}

func must(j Job, err error) Job {
	if err != nil {
		panic(err)
	}
	return j
}

// Every advice says what changes, and says it once.
func TestAdviceIsNotEmpty(t *testing.T) {
	j := jobFor(t, "llama3.1-70b", "64xgb200", 8192, 4<<20)
	var err error
	if j.Profile, err = price.Find("megatron"); err != nil {
		t.Fatal(err)
	}
	j.Fixed = Fixed{"tp": "8", "pp": "4", "schedule": "1f1b", "microbatch": "1"}
	r, err := Search(t.Context(), j)
	if err != nil {
		t.Fatal(err)
	}
	p := *r.Choices[0].Plan
	p.TP.Sequence = false
	j.Fixed = nil
	list, err := Improve(t.Context(), j, &p, 2*r.Choices[0].Step)
	if err != nil || len(list) == 0 {
		t.Fatal(list, err)
	}
	seen := map[string]bool{}
	for _, h := range list {
		if h.Change == "" || seen[h.Change] {
			t.Errorf("%q is listed again, or is empty", h.Change)
		}
		seen[h.Change] = true
	}
}

// A batch that may be large is as large as it must be: 16 M tokens once were taken for a thousandth
// over 4 M.
func TestABatchIsNoLargerThanItMustBe(t *testing.T) {
	j := jobFor(t, "llama3.1-70b", "64xgb200", 8192, 0)
	j.MaxBatch, j.Fixed, j.Top = 16<<20/8192, Fixed{"cp": "1"}, 1
	r, err := Search(t.Context(), j)
	if err != nil {
		t.Fatal(err)
	}
	large := j
	large.Batch, large.MaxBatch = j.MaxBatch, 0
	most, err := Search(t.Context(), large)
	if err != nil {
		t.Fatal(err)
	}
	if a, b := r.Choices[0], most.Choices[0]; a.Plan.Batch >= j.MaxBatch || a.Rate < b.Rate*0.98 {
		t.Errorf("%d rows at %.0f tokens a second, all %d at %.0f", a.Plan.Batch, a.Rate, b.Plan.Batch, b.Rate)
	}
}

// MFU counts what Megatron and others count for a causal model: 6 FLOPs for each weight of a linear
// layer and 6·layers·hidden·seq/2·2 for attention.
func TestMFU(t *testing.T) {
	j := jobFor(t, "llama3.1-8b", "8xb200", 8192, 1<<20)
	weights := 8.03e9 - 128256*4096 // the embedding is a lookup
	token := 6*weights + 12*32*4096*8192/2
	want := token * (1 << 20) / (8 * 2.25e15 * 7)
	if got := j.MFU(128, 8, 7); math.Abs(got/want-1) > 0.002 {
		t.Errorf("an MFU of %v, want %v", got, want)
	}
	j.Cluster.GPU.Peak.BF16 = 0
	if got := j.MFU(128, 8, 7); got != 0 {
		t.Errorf("an MFU of %v without a peak", got)
	}
}
