package price

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/golden"
	"github.com/deepwell/deepwell/machine"
)

func cluster(t testing.TB, text string) machine.Cluster {
	t.Helper()
	c, err := machine.ParseCluster(text)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func find(t testing.TB, name string) *Profile {
	t.Helper()
	p, err := Find(name)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestTablesAreWhole(t *testing.T) {
	if n := len(gemmRates()); n != 6 {
		t.Errorf("%d GEMM tables, want 2 architectures × 3 types", n)
	}
	for key, g := range gemmRates() {
		for i := range g {
			for j := range g[i] {
				for k, v := range g[i][j] {
					if !(v > 1e12) {
						t.Errorf("%v at %d %d %d is %v", key, i, j, k, v)
					}
				}
			}
		}
	}
	if n := len(curves()); n != 64 {
		t.Errorf("%d curves of collectives", n)
	}
	for key, c := range curves() {
		for i := range c {
			if !(c[i] > 0) || i > 0 && c[i] < c[i-1] {
				t.Errorf("%v goes down at %d", key, i)
			}
		}
	}
}

// The table of sm_90 has FP8 rates above the GPU's peak.
func TestRatesAreBoundedByThePeak(t *testing.T) {
	h100 := cluster(t, "8xh100").GPU
	over, g := 0, gemmRates()[[2]string{"sm_90", "fp8"}]
	for i := range g {
		for j := range g[i] {
			for _, v := range g[i][j] {
				if v > h100.Peak.FP8 {
					over++
				}
			}
		}
	}
	if over == 0 {
		t.Error("no entry is above the peak; the bound is not needed any more")
	}
	n := 4096.0
	if r := 2 * n * n * n / times("sm_90", "fp8", h100.Peak.FP8).seconds(n, n, n); r > h100.Peak.FP8*1.0001 {
		t.Errorf("%v is above the peak", r)
	}
}

func TestNoProductIsFasterThanItsPeak(t *testing.T) {
	for _, c := range machine.GPUModels() {
		for _, prof := range Profiles() {
			p := New(cluster(t, "8x"+c.Name), &prof)
			for prec, peak := range map[dtype.Format]float64{dtype.FormatBF16: c.Peak.BF16, dtype.FormatFP8: c.Peak.FP8,
				dtype.MXFP8: c.Peak.MXFP8, dtype.NVFP4: c.Peak.NVFP4} {
				if peak == 0 {
					peak = c.Peak.BF16 // computed as BF16
				}
				n := 16384.0
				if rate := 2 * n * n * n / p.GEMM(prec, n, n, n); rate > peak {
					t.Errorf("%s %s %s: %.0f TFLOP/s", c.Name, prof.Name, prec, rate/1e12)
				}
			}
		}
	}
}

// More work is never done sooner.
func TestMonotone(t *testing.T) {
	names := []string{"8xb200", "144xgb200", "64xh100", "16xa100", "8xrtx6000pro", "8xcpu"}
	rapid.Check(t, func(r *rapid.T) {
		p := New(cluster(t, rapid.SampledFrom(names).Draw(r, "cluster")), find(t, "megatron"))
		size := rapid.Float64Range(1, 65536)
		m, k, n := size.Draw(r, "m"), size.Draw(r, "k"), size.Draw(r, "n")
		more := rapid.Float64Range(1, 8).Draw(r, "more")
		prec := rapid.SampledFrom([]dtype.Format{dtype.FormatBF16, dtype.FormatFP8, dtype.MXFP8, dtype.NVFP4}).Draw(r, "precision")
		experts := rapid.Float64Range(1, 64).Draw(r, "experts")
		check := func(what string, less, more float64) {
			if !(less >= 0) || more < less*(1-1e-9) {
				r.Errorf("%s: %v, then %v", what, less, more)
			}
		}
		check("product m", p.GEMM(prec, m, k, n), p.GEMM(prec, m*more, k, n))
		check("product k", p.GEMM(prec, m, k, n), p.GEMM(prec, m, k*more, n))
		check("product n", p.GEMM(prec, m, k, n), p.GEMM(prec, m, k, n*more))
		check("grouped", p.Grouped(prec, experts, m, k, n, false),
			p.Grouped(prec, experts, m*more, k, n, false))
		check("weights", p.Grouped(prec, experts, m, k, n, true),
			p.Grouped(prec, experts, m, k*more, n, true))
		check("attention", p.Attention(m, k, 16, 128, 128, true),
			p.Attention(m*more, k, 16, 128, 128, true))
		kind := rapid.SampledFrom([]Kind{AllGather, ReduceScatter, AllReduce, AllToAll,
			Permute}).Draw(r, "kind")
		bytes := rapid.Float64Range(1, 1e10).Draw(r, "bytes")
		g := Group{1 << rapid.Int64Range(1, 6).Draw(r, "size"), 1 << rapid.Int64Range(0, 6).Draw(r, "stride")}
		check("collective", p.Collective(kind, bytes, g), p.Collective(kind, bytes*more, g))
		near, far := Group{8, 1}, Group{8, 4096}
		check("distance", p.Collective(kind, 1e6+bytes, near), p.Collective(kind, 1e6+bytes, far))
		check("stream", p.Stream(bytes), p.Stream(bytes*more))
		check("offload", p.Offload(bytes), p.Offload(bytes*more))
	})
}

func TestAGroupLiesWhereItsStridesPutIt(t *testing.T) {
	for _, tt := range []struct {
		cluster string
		g       Group
		want    spread
	}{
		{"64xb200", Group{8, 1}, spread{8, 8, 1}},
		{"64xb200", Group{8, 8}, spread{1, 1, 8}},
		{"64xb200", Group{16, 1}, spread{8, 8, 2}},
		{"64xb200", Group{16, 2}, spread{4, 4, 4}},
		{"144xgb200", Group{72, 1}, spread{72, 72, 1}},
		{"144xgb200", Group{9, 8}, spread{9, 9, 1}},
		{"128xgb200", Group{64, 1}, spread{64, 64, 1}},
		{"8xrtx6000pro", Group{8, 1}, spread{8, 8, 1}},
		// Domains of 72: the third group of 32 has 8 devices in the first domain.
		{"576xgb200", Group{32, 1}, spread{32, 8, 2}},
		{"576xgb200", Group{16, 2}, spread{16, 4, 2}},
		{"576xgb200", Group{96, 1}, spread{72, 24, 2}},
		{"576xgb200", Group{24, 1}, spread{24, 24, 1}},
		{"512xgb200", Group{32, 1}, spread{32, 32, 1}}, // taken as 8 domains of 64
	} {
		p := New(cluster(t, tt.cluster), find(t, "deepwell"))
		if got := p.spread(tt.g); got != tt.want {
			t.Errorf("%s %v: %+v; want %+v", tt.cluster, tt.g, got, tt.want)
		}
	}
}

// The worst group of an axis counts.
func TestTheWorstGroupCounts(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		name := rapid.SampledFrom([]string{"576xgb200", "144xgb200", "96xb200", "60xgb300", "108xh100"}).Draw(r, "cluster")
		cl := cluster(t, name)
		draw := func(what string, n int64) int64 {
			var list []int64
			for d := int64(1); d <= n; d++ {
				if n%d == 0 {
					list = append(list, d)
				}
			}
			return rapid.SampledFrom(list).Draw(r, what)
		}
		g := Group{Size: draw("size", int64(cl.Count))}
		g.Stride = draw("stride", int64(cl.Count)/g.Size)
		want := spread{0, g.Size, 0}
		for base := range int64(cl.Count) {
			if base%(g.Size*g.Stride) >= g.Stride {
				continue
			}
			in := map[int64]int64{}
			for i := range g.Size {
				in[(base+i*g.Stride)/cl.Domain()]++
			}
			for _, n := range in {
				want.most, want.least = max(want.most, n), min(want.least, n)
			}
			want.domains = max(want.domains, int64(len(in)))
		}
		p := New(cl, find(t, "deepwell"))
		if got := p.spread(g); got != want {
			r.Fatalf("%s %+v: %+v, want %+v", name, g, got, want)
		}
	})
}

// An exchange among groups that straddle two NVLink domains is as slow as the network: in domains
// of 72 groups of 32 once were priced as if each lay in one domain.
func TestGroupsThatStraddleDomainsAreSlow(t *testing.T) {
	even := New(cluster(t, "512xgb200"), find(t, "deepwell")) // 8 domains of 64
	uneven := New(cluster(t, "576xgb200"), find(t, "deepwell"))
	for kind, times := range map[Kind]float64{AllGather: 1.05, ReduceScatter: 1.05, AllReduce: 1.2, AllToAll: 5} {
		a, b := even.Collective(kind, 256<<20, Group{32, 1}), uneven.Collective(kind, 256<<20, Group{32, 1})
		if b < times*a {
			t.Errorf("%s of 32 takes %.3g s in domains of 72, and %.3g s in domains of 64", kind, b, a)
		}
		if b := uneven.Collective(kind, 256<<20, Group{24, 1}); b > 1.1*a {
			t.Errorf("%s of 24 takes %.3g s in domains of 72", kind, b)
		}
	}
	if other := even.Collective("broadcast", 256<<20, Group{32, 1}); !(other > 0) {
		t.Errorf("a kind that is not in the table takes %v s", other)
	}
}

func TestProfilesSayWhereTheyComeFrom(t *testing.T) {
	for _, p := range Profiles() {
		if p.Source == "" || p.Error.Dense <= 0 || p.Error.Expert <= 0 {
			t.Errorf("%s: %q, %+v", p.Name, p.Source, p.Error)
		}
		for _, e := range p.Effects() {
			if !(*e.Value > 0) || e.Sigma <= 0 || e.Why == "" {
				t.Errorf("%s: %s is %v", p.Name, e.Name, *e.Value)
			}
		}
	}
	if _, err := Find("megatrn"); err == nil || !strings.Contains(err.Error(), "megatrn") {
		t.Errorf("an unknown name: %v", err)
	}
	a := find(t, "megatron")
	b := a.Clone()
	b.GEMM, b.Error.GPUs[0] = 2, "cpu"
	if a.GEMM == 2 || a.Error.GPUs[0] == "cpu" {
		t.Error("a clone shares what it should not")
	}
}

// A few prices, so that a change of a table or a constant is seen in review.
func TestGolden(t *testing.T) {
	var b strings.Builder
	us := func(s float64) string { return fmt.Sprintf("%10.1f µs", s*1e6) }
	for _, name := range []string{"64xb200", "144xgb200", "64xgb300", "64xh100", "64xa100",
		"8xrtx6000pro", "8xcpu"} {
		p := New(cluster(t, name), find(t, "megatron"))
		fmt.Fprintf(&b, "%s\n", name)
		for _, n := range []float64{512, 4096, 16384} {
			fmt.Fprintf(&b, "  product %5.0f³   bf16 %s  fp8 %s  mxfp8 %s  nvfp4 %s\n", n,
				us(p.GEMM(dtype.FormatBF16, n, n, n)), us(p.GEMM(dtype.FormatFP8, n, n, n)),
				us(p.GEMM(dtype.MXFP8, n, n, n)), us(p.GEMM(dtype.NVFP4, n, n, n)))
		}
		fmt.Fprintf(&b, "  32 experts of 1024x7168x4096 %s  weights %s\n",
			us(p.Grouped(dtype.FormatBF16, 32, 1024, 7168, 4096, false)),
			us(p.Grouped(dtype.FormatBF16, 32, 7168, 1024, 4096, true)))
		fmt.Fprintf(&b, "  attention 4096 tokens, 64 heads %s  backward %s\n",
			us(p.Attention(4096, 2048.5, 64, 128, 128, false)),
			us(p.Attention(4096, 2048.5, 64, 128, 128, true)))
		for _, kind := range []Kind{AllGather, ReduceScatter, AllReduce, AllToAll, Permute} {
			fmt.Fprintf(&b, "  %-14s 64 MiB  8 near %s  8 far %s  64 %s\n", kind,
				us(p.Collective(kind, 1<<26, Group{8, 1})), us(p.Collective(kind, 1<<26, Group{8, 64})),
				us(p.Collective(kind, 1<<26, Group{64, 1})))
		}
		fmt.Fprintf(&b, "  stream 1 GiB %s  offload 1 GiB %s  quantize 64 Mi %s\n", us(p.Stream(1<<30)),
			us(p.Offload(1<<30)), us(p.Quantize(dtype.MXFP8, 1<<26, 2)))
	}
	golden.Compare(t, filepath.Join("testdata", "prices.txt"), []byte(b.String()))
}

func ExamplePrices_Collective() {
	cl, _ := machine.ParseCluster("64xb200")
	prof, _ := Find("megatron")
	p := New(cl, prof)
	fmt.Printf("inside a host %.0f µs, between hosts %.0f µs\n",
		1e6*p.Collective(AllGather, 1<<26, Group{Size: 8, Stride: 1}),
		1e6*p.Collective(AllGather, 1<<26, Group{Size: 8, Stride: 8}))
	// Output: inside a host 150 µs, between hosts 1454 µs
}
