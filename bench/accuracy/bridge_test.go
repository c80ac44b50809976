package main

import (
	"math"
	"slices"
	"testing"

	"github.com/deepwell/deepwell/internal/slowtest"

	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/price"
)

// TestRegression finds two constants again, although one row in ten is far off.
func TestRegression(t *testing.T) {
	var a, b float64
	r := regression{noise: 0.02, rounds: 40, constants: []price.Effect{
		{Name: "a", Value: &a, Prior: 1, Sigma: 1}, {Name: "b", Value: &b, Prior: 1, Sigma: 1}}}
	time := func(v []float64, row int) float64 { return v[0] + v[1]*float64(row) }
	r.predict = func(v []float64, rows []int) ([]float64, error) {
		var out []float64
		for _, i := range rows {
			out = append(out, time(v, i))
		}
		return out, nil
	}
	want := []float64{2.5, 0.4}
	weights := make([]float64, 50)
	for i := range weights {
		weights[i] = 1
		r.measured = append(r.measured, time(want, i))
		if i%10 == 3 {
			r.measured[i] *= 3
		}
	}
	got, err := r.fit(weights)
	if err != nil {
		t.Fatal(err)
	}
	for j := range want {
		if math.Abs(got[j]/want[j]-1) > 0.02 { // the priors and the bad rows pull a little
			t.Errorf("constant %d is %.4g, want %.4g", j, got[j], want[j])
		}
	}
}

func TestBridgeRows(t *testing.T) {
	rows, err := mbridge()
	if err != nil {
		t.Fatal(err)
	}
	if len(rows) != 146 {
		t.Errorf("%d rows, want 146", len(rows))
	}
	for _, r := range rows {
		layers := int64(0)
		for _, n := range r.options.Layers {
			layers += n
		}
		if r.options.Layers != nil && layers != r.config.Layers {
			t.Errorf("%s lays %d of %d layers out", r.id, layers, r.config.Layers)
		}
		devices := r.plan.FSDP.Size * r.plan.TP.Size * r.plan.CP.Size * r.plan.PP.Size
		if devices != int64(r.cluster.Count) {
			t.Errorf("%s uses %d of %d devices", r.id, devices, r.cluster.Count)
		}
	}
}

// TestBridgeShipped holds the constants of package price to the fit: the named profiles price the
// rows as well as it does.
func TestBridgeShipped(t *testing.T) {
	b, err := newBridge()
	if err != nil {
		t.Fatal(err)
	}
	shipped := price.MegatronBridge().Effects()
	values := make([]float64, len(shipped))
	rows := make([]int, len(b.rows))
	for j, e := range shipped {
		values[j] = *e.Value
	}
	for i := range rows {
		rows[i] = i
	}
	b.latest = len(releases) - 1
	times, err := b.times(values, rows)
	if err != nil {
		t.Fatal(err)
	}
	sum := 0.0
	for i, s := range times {
		sum += relative(s, b.measured[i]) / float64(len(times))
	}
	if sum > 0.042 { // 3.8 % when they were fitted
		t.Errorf("the shipped constants are %.2f %% off in the mean", 100*sum)
	}
}

// TestKnown holds the models that profiles say they were fitted on to their presets.
func TestKnown(t *testing.T) {
	for _, p := range price.Profiles() {
		for _, k := range p.Error.Models {
			found, err := model.Find(k.Name)
			if err != nil {
				t.Fatal(err)
			}
			c := found.Config
			own := price.Known{Name: k.Name, Hidden: c.Hidden, MLP: c.MLP}
			if c.MoE != nil {
				own.MLP, own.Experts = c.MoE.MLP, c.MoE.Experts
			}
			if own != k {
				t.Errorf("%s: %+v, the preset is %+v", p.Name, k, own)
			}
		}
	}
}

// TestVerdicts checks that every plan that ran fits its GPU.
func TestVerdicts(t *testing.T) {
	rows, err := mbridge()
	if err != nil {
		t.Fatal(err)
	}
	count, err := verdicts(rows, price.MegatronBridge())
	if err != nil {
		t.Fatal(err)
	}
	if count["no"] > 0 || count["nothing"] < 120 {
		t.Errorf("what rows need in order to fit: %v", count)
	}
}

// TestPlacing looks for one of NVIDIA's plans in a search.
func TestPlacing(t *testing.T) {
	if testing.Short() || !slowtest.Enabled {
		t.Skip("a second of searches")
	}
	rows, err := mbridge()
	if err != nil {
		t.Fatal(err)
	}
	at := slices.IndexFunc(rows, func(r bridgeRow) bool { return r.id == "mbridge-008" })
	k := placing{row: &rows[at]}
	if err := k.search(t.Context(), price.MegatronBridge()); err != nil {
		t.Fatal(err)
	}
	if k.mesh == 0 || k.mesh > first || k.fits != "nothing" {
		t.Errorf("%s", k.line(" "))
	}
}

func TestNine(t *testing.T) {
	off := []float64{0.5, 0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9}
	for _, c := range []struct {
		weights []float64
		want    float64
	}{
		{nil, 0.9}, // nine of ten, the tenth being still to come
		{[]float64{1, 19, 1, 1, 1, 1, 1, 1, 1}, 0.8},
	} {
		if got := nine(off, c.weights) * 1.645; math.Abs(got-c.want) > 1e-9 {
			t.Errorf("weights %v: %v, want %v", c.weights, got, c.want)
		}
	}
	// One model that is twice the noise off leaves much room; ten leave little more.
	if one, ten := strange(0.02, []float64{0.0016}), strange(0.02, slices.Repeat(
		[]float64{0.0016}, 10)); one < 3*ten || ten < 0.03 {
		t.Errorf("%v from one model, %v from ten", one, ten)
	}
}

// TestBridgeGoals holds one split to the goals; the command makes all of them.
func TestBridgeGoals(t *testing.T) {
	if testing.Short() || !slowtest.Enabled {
		t.Skip("fits 25 constants")
	}
	b, err := newBridge()
	if err != nil {
		t.Fatal(err)
	}
	r, err := b.hold(bridgeSplits()[3])
	if err != nil {
		t.Fatal(err)
	}
	_, only := bridgeColumns()
	if all, dense := r.mean(b, r.with, only[0]), r.mean(b, r.with, only[1]); all > 6 || dense > 4 {
		t.Errorf("%s: %.1f %% mean, dense %.1f %%; want at most 6 and 4", r.name, all, dense)
	}
}

func TestSweepLayers(t *testing.T) {
	known, err := models()
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string][]int64{
		// The head counts as 4 and 2.2 layers.
		"nanotron-1.34b": {5, 5, 5, 1}, "nanotron-8.86b": {8, 9, 8, 7},
	} {
		c := known[name].dense()
		if got := sweepLayers(c, 4); !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
}

func TestSift(t *testing.T) {
	list, err := nanotron()
	if err != nil {
		t.Fatal(err)
	}
	clean, cells := 0, map[string]bool{}
	for i := range list {
		if list[i].clean {
			clean++
			cells[list[i].cell] = true
		}
	}
	if len(list) != 1728 || clean != 1283 || len(cells) != 22 {
		t.Errorf("%d rows, %d clean in %d cells; want 1728, 1283, 22", len(list), clean, len(cells))
	}
}

func TestKendall(t *testing.T) {
	for _, c := range []struct {
		x, y []float64
		want float64
	}{
		{[]float64{1, 2, 3}, []float64{4, 5, 6}, 1},
		{[]float64{1, 2, 3}, []float64{6, 5, 4}, -1},
		{[]float64{1, 2, 3, 4}, []float64{1, 2, 2, 4}, 5 / math.Sqrt(6*5)},
	} {
		if got := kendall(c.x, c.y); math.Abs(got-c.want) > 1e-12 {
			t.Errorf("kendall(%v, %v) = %v, want %v", c.x, c.y, got, c.want)
		}
	}
}

// TestSweepGoals holds one draw to the goals; the command makes all of them.
func TestSweepGoals(t *testing.T) {
	if testing.Short() || !slowtest.Enabled {
		t.Skip("fits 23 constants")
	}
	w, err := newSweep()
	if err != nil {
		t.Fatal(err)
	}
	r, _, err := w.hold(func(i int) bool { return i%5 == 0 })
	if err != nil {
		t.Fatal(err)
	}
	if r.median > 0.03 || r.tau < 0.85 { // 0.86 is the mean over draws, which differ by 0.01
		t.Errorf("median regret %.3f, tau %.3f", r.median, r.tau)
	}
}
