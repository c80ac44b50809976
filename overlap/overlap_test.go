package overlap

import (
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/internal/golden"
	"github.com/deepwell/deepwell/machine"
)

// even are rates that make the arithmetic of the tests plain: a GEMM of two squares takes 4 s,
// the ring of a gather among 8 takes 7 s over NVLink and ten times that over the network, and
// memory takes no time worth counting.
func even() Rates {
	const bytes = 2.0 * side * side
	return Rates{BF16: bytes * side / 4, Attention: 1, Memory: 1e18, NVLink: bytes / 8,
		Network: bytes / 80}
}

const (
	oneDomain  = 8
	twoDomains = 16
)

func target(t testing.TB, devices int) machine.Cluster {
	t.Helper()
	c, err := machine.ParseCluster(map[int]string{8: "8xb200", 16: "16xb200", 64: "64xb200"}[devices])
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func mustRead(t testing.TB, m *hlo.Module, devices int) *Report {
	t.Helper()
	r, err := Read(m, target(t, devices), even())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// near holds seconds of the model to what the arithmetic gives. The memory that kernels move takes
// less than a microsecond at the rates of the tests.
func near(t *testing.T, what string, got, want float64) {
	t.Helper()
	if math.Abs(got-want) > 1e-6 {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}

const sync = `{"collective_backend_config":{"is_sync":true}}`
const fast = `{"collective_backend_config":{"communication_domain":` +
	`"COLLECTIVE_COMMUNICATION_DOMAIN_SCALE_UP_FABRIC"}}`

// A gather of 7 s beside a GEMM of 4 s leaves 3 s to wait for, and beside two nothing.
func TestOneCollectiveBesideGEMMs(t *testing.T) {
	for gemms, exposed := range []float64{7, 3, 0} {
		b := &builder{}
		e := b.list("entry")
		x, w := e.param(0, shard()), e.param(1, whole())
		s := e.start("all-gather", group(1, 8, 1), "", x)
		y := w
		for range gemms {
			y = e.gemm(y, w)
		}
		e.gemm(y, e.done("all-gather", s))
		r := mustRead(t, b.read(t, e.end(), 8), oneDomain)
		near(t, "wire", r.Wire, 7)
		near(t, "exposed", r.Exposed, exposed)
		near(t, "compute", r.Compute.Seconds(), float64(4*gemms+4))
		near(t, "run", r.Seconds, r.Compute.Seconds()+exposed)
		near(t, "hidden", r.Hidden, 1-exposed/7)
		between := 0.0
		if gemms > 0 {
			between = 2 * side * side
		}
		near(t, "bytes with a GEMM between", r.Traffic[0].Between, between)
	}
}

// What was started before has the stream, and it is what compute waits for.
func TestWaitingIsBlamedOnWhatHasTheStream(t *testing.T) {
	b := &builder{}
	e := b.list("entry")
	x, w := e.param(0, shard()), e.param(1, whole())
	first := e.start("all-gather", group(1, 8, 1), "", x)
	second := e.start("all-gather", group(1, 8, 1), "", x)
	y := e.gemm(w, e.done("all-gather", second)) // waits 7 s for the first, 7 s for its own
	e.gemm(y, e.done("all-gather", first))
	r := mustRead(t, b.read(t, e.end(), 8), oneDomain)
	near(t, "exposed", r.Exposed, 14)
	if len(r.Waits) != 2 {
		t.Fatalf("%d wait, want 2", len(r.Waits))
	}
	for _, w := range r.Waits {
		near(t, w.Name, w.Exposed, 7)
	}
}

func TestSynchronousCollectivesAreExposed(t *testing.T) {
	b := &builder{}
	e := b.list("entry")
	x, w := e.param(0, shard()), e.param(1, whole())
	s := e.start("all-gather", group(1, 8, 1), sync, x)
	y := e.gemm(w, w)
	e.gemm(y, e.done("all-gather", s))
	r := mustRead(t, b.read(t, e.end(), 8), oneDomain)
	near(t, "exposed", r.Exposed, 7)
	near(t, "hidden", r.Hidden, 0)
	near(t, "synchronous bytes", r.Traffic[0].Sync, 2*side*side)
}

// Collectives inside a domain wait for those between domains only where XLA gave them one stream.
// Between two hosts a pair takes 40 s, (2−1)/2 of the bytes; inside one the ring takes 7 s.
func TestTwoDomains(t *testing.T) {
	for _, test := range []struct {
		name, config string
		exposed      float64
	}{
		{"one stream", "", 40 + 7 - 4},
		{"two streams", fast, (7 - 4) + (40 - 7 - 4)},
	} {
		b := &builder{}
		e := b.list("entry")
		x, w := e.param(0, shard()), e.param(1, whole())
		far := e.start("all-gather", group(8, 2, 8), "", x)
		close := e.start("all-gather", group(2, 8, 1), test.config, x)
		y := e.gemm(w, w)
		y = e.gemm(y, e.done("all-gather", close))
		e.gemm(y, e.done("all-gather", far))
		r := mustRead(t, b.read(t, e.end(), 16), twoDomains)
		near(t, test.name, r.Exposed, test.exposed)
		for _, row := range r.Traffic {
			switch row.Fabric {
			case network:
				near(t, test.name+": network", row.Wire, 40)
			case nvlink:
				near(t, test.name+": nvlink", row.Wire, 7)
			}
		}
	}
}

// Memory to which nothing is written takes no time.
func TestAllocationIsFree(t *testing.T) {
	b := &builder{}
	e := b.list("entry")
	x := e.with("custom-call", whole(), msg(nil).Text(28, hlo.AllocateBuffer))
	e.gemm(x, e.param(0, whole()))
	near(t, "run", mustRead(t, b.read(t, e.end(), 8), oneDomain).Seconds, 4)
}

func TestLoopsAreMultipliedOut(t *testing.T) {
	for _, rounds := range []int{1, 2, 126} {
		b := &builder{}
		shape := tupleOf(shard(), whole())
		body := b.list("body")
		p := body.param(0, shape)
		x, w := body.element(0, shard(), p), body.element(1, whole(), p)
		s := body.start("all-gather", group(1, 8, 1), "", x)
		y := body.gemm(w, w)
		full := body.done("all-gather", s)
		y = body.gemm(y, full)
		body.add("tuple", shape, x, y)
		id := body.end()
		e := b.list("entry")
		e.repeat(id, rounds, shape, e.param(0, shape))
		r := mustRead(t, b.read(t, e.end(), 8), oneDomain)
		n := float64(rounds)
		near(t, "wire", r.Wire, 7*n)
		near(t, "exposed", r.Exposed, 3*n)
		near(t, "run", r.Seconds, 11*n)
		near(t, "count", r.Traffic[0].Count, n)
		if len(r.Loops) != 1 || r.Loops[0].Rounds != int64(rounds) {
			t.Fatalf("loops %+v", r.Loops)
		}
		near(t, "exposed in a round", r.Loops[0].Exposed, 3)
	}
}

// A round that does what two of the program's rounds do counts half.
func TestRoundsThatAreTwo(t *testing.T) {
	l := Loop{Twice: true, Kernels: []Kernel{{Bytes: 3}, {Bytes: 5}, {Bytes: 9, FLOPs: 1}}}
	if bytes, n := l.Moved(); bytes != 4 || n != 1 || l.Each() != 2 {
		t.Errorf("%d kernels move %d bytes, of %d rounds", n, bytes, l.Each())
	}
}

// A gather whose result goes round is for the next round; one that is used at once is not.
func TestPrefetchIsSeen(t *testing.T) {
	for _, ahead := range []bool{true, false} {
		b := &builder{}
		shape := tupleOf(shard(), whole(), whole())
		body := b.list("body")
		p := body.param(0, shape)
		x, y, w := body.element(0, shard(), p), body.element(1, whole(), p), body.element(2, whole(), p)
		s := body.start("all-gather", group(1, 8, 1), "", x)
		next := w
		if ahead {
			y = body.gemm(y, w)
			y = body.gemm(y, w)
			next = body.add("copy", whole(), body.done("all-gather", s))
		} else {
			y = body.gemm(y, body.done("all-gather", s))
		}
		body.add("tuple", shape, x, y, next)
		id := body.end()
		e := b.list("entry")
		e.repeat(id, 10, shape, e.param(0, shape))
		r := mustRead(t, b.read(t, e.end(), 8), oneDomain)
		g := r.Loops[0].Gathers
		want := []Gather{{Group: hlo.Group{Count: 1, Size: 8, Stride: 1}, Fabric: nvlink,
			Bytes: 2 * side * side}}
		if ahead {
			want[0].Ahead = want[0].Bytes
			near(t, "exposed", r.Exposed, 0)
		} else {
			near(t, "exposed", r.Exposed, 70)
		}
		if diff := cmp.Diff(want, g); diff != "" {
			t.Error(diff)
		}
	}
}

func TestRingsTakeWhatTheirLinksAllow(t *testing.T) {
	w := wire{rates: Rates{NVLink: 100, Network: 10}, devices: 64, domain: 8}
	all := hlo.Group{Count: 1, Size: 64, Stride: 1}
	inside := hlo.Group{Count: 8, Size: 8, Stride: 1}
	across := hlo.Group{Count: 8, Size: 8, Stride: 8}
	mixed := hlo.Group{Count: 4, Size: 16, Stride: 4} // two of every host
	for _, test := range []struct {
		kind    hlo.Kind
		group   hlo.Group
		domain  string
		fabric  string
		seconds float64
	}{
		{hlo.AllGather, inside, "", nvlink, 800 * 7 / 8. / 100},
		{hlo.ReduceScatter, across, "", network, 800 * 7 / 8. / 10},
		{hlo.AllReduce, across, "", network, 2 * 800 * 7 / 8. / 10},
		{hlo.AllGather, all, "", network, 800 * 63 / 64. / 80},
		{hlo.AllGather, mixed, "", network, 800 * 15 / 16. / 20},
		{hlo.AllGather, hlo.Group{}, "", network, 800 * 63 / 64. / 80},
		{hlo.AllToAll, inside, "", nvlink, 800 * 7 / 8. / 100},
		{hlo.AllToAll, all, "", network, 800 * 56 / 64. / 10},
		{hlo.CollectivePermute, hlo.Group{Pairs: 64}, "", network, 80},
		{hlo.CollectivePermute, hlo.Group{Pairs: 64}, scaleUp, nvlink, 8},
		{hlo.AllGather, hlo.Group{Count: 64, Size: 1}, "", nvlink, 0},
		{hlo.AllGather, hlo.Group{Count: 8, Size: 8}, "", network, 800 * 7 / 8. / 10}, // irregular
	} {
		c := hlo.Collective{Kind: test.kind, Group: test.group, OperandBytes: 800, ResultBytes: 800}
		got := w.travel([]hlo.Collective{c}, test.domain)
		if got.fabric != test.fabric || math.Abs(got.seconds-test.seconds) > 1e-9 {
			t.Errorf("%s in %s: %+v, want %s %v", test.kind, test.group, got, test.fabric, test.seconds)
		}
	}
}

// Exposed time is never more than the wire's, and never more than the run without compute.
func TestExposedIsBounded(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		b := &builder{}
		e := b.list("entry")
		x, w := e.param(0, shard()), e.param(1, whole())
		var open []int64
		y := w
		for range rapid.IntRange(1, 20).Draw(rt, "steps") {
			switch rapid.IntRange(0, 2).Draw(rt, "what") {
			case 0:
				config := rapid.SampledFrom([]string{"", fast, sync}).Draw(rt, "config")
				open = append(open, e.start("all-gather", group(1, 8, 1), config, x))
			case 1:
				y = e.gemm(y, w)
			case 2:
				if len(open) > 0 {
					y = e.gemm(y, e.done("all-gather", open[0]))
					open = open[1:]
				}
			}
		}
		for _, s := range open {
			y = e.gemm(y, e.done("all-gather", s))
		}
		e.add("tuple", tupleOf(whole()), y)
		r := mustRead(t, b.read(t, e.end(), 8), oneDomain)
		if r.Exposed > r.Wire+1e-6 || r.Hidden < -1e-6 || r.Hidden > 1 {
			rt.Fatalf("exposed %v of %v", r.Exposed, r.Wire)
		}
		if math.Abs(r.Seconds-r.Compute.Seconds()-r.Exposed) > 1e-6 {
			rt.Fatalf("a run of %v is not %v of compute and %v exposed", r.Seconds,
				r.Compute.Seconds(), r.Exposed)
		}
	})
}

func TestRatesOfB200AreThoseOfTheReference(t *testing.T) {
	c, err := machine.FindGPUModel("b200")
	if err != nil {
		t.Fatal(err)
	}
	r, err := RatesOf(c)
	if err != nil {
		t.Fatal(err)
	}
	want := Rates{BF16: 0.485 * 2.25e15, FP8: 1.9 * 0.485 * 2.25e15, FP4: 1.9 * 1.8 * 0.485 * 2.25e15,
		Attention: 1.12e15, Memory: 0.69 * 7.7e12, NVLink: 650e9, Network: 45e9}
	rounded := r
	for _, v := range []*float64{&rounded.BF16, &rounded.FP8, &rounded.FP4, &rounded.Attention,
		&rounded.Memory, &rounded.NVLink, &rounded.Network} {
		*v = math.Round(*v/1e6) * 1e6 // divisions leave a last digit
	}
	if diff := cmp.Diff(want, rounded); diff != "" {
		t.Error(diff)
	}
	for _, c := range machine.GPUModels() {
		if _, err := RatesOf(c); err != nil {
			t.Errorf("%s: %v", c.Name, err)
		}
	}
	if _, err := RatesOf(machine.GPUModel{Name: "none"}); err == nil {
		t.Error("a GPU without rates has some")
	}
}

// The programs of the reader's tests are compiled ones; what the model makes of them is kept.
func TestCompiledPrograms(t *testing.T) {
	for _, name := range []string{"b200_pipelined", "b200_attention_plan", "b200_branch",
		"b200_exchange", "b200_mxfp8_1024"} {
		t.Run(name, func(t *testing.T) {
			code, err := os.ReadFile(filepath.Join("..", "hlo", "testdata", name+".hlo"))
			if err != nil {
				t.Fatal(err)
			}
			m, err := hlo.Read("hlo_with_config", code)
			if err != nil {
				t.Fatal(err)
			}
			c, err := machine.ParseCluster("1024xb200")
			if err != nil {
				t.Fatal(err)
			}
			rates, err := RatesOf(c.GPU)
			if err != nil {
				t.Fatal(err)
			}
			r, err := Read(m, c, rates)
			if err != nil {
				t.Fatal(err)
			}
			golden.Compare(t, filepath.Join("testdata", name+".golden"), []byte(r.String()))
			text, err := r.JSON()
			if err != nil {
				t.Fatal(err)
			}
			var again Report
			if err := json.Unmarshal(text, &again); err != nil || again.Hidden != r.Hidden {
				t.Error("JSON does not come back:", err)
			}
		})
	}
}

func TestUnknownRatesAreAnError(t *testing.T) {
	b := &builder{}
	e := b.list("entry")
	s := e.start("all-gather", group(1, 8, 1), "", e.param(0, shard()))
	e.done("all-gather", s)
	m := b.read(t, e.end(), 8)
	r := even()
	r.NVLink = 0
	if _, err := Read(m, target(t, 8), r); err == nil || !strings.Contains(err.Error(), "rate") {
		t.Error("a network of no speed:", err)
	}
	if _, err := Read(m, target(t, 8), Rates{}); err == nil {
		t.Error("no rates at all")
	}
}

// A fusion around a library call moves what the call moves: slices of stacks, not stacks, and no
// scratch memory. It is the call's kernel, and has its shape.
func TestFusionAroundALibraryCall(t *testing.T) {
	sized := func(list ...int64) (out []hlo.Value) {
		for _, n := range list {
			out = append(out, hlo.Value{Bytes: n})
		}
		return out
	}
	inner := &hlo.Computation{Root: 8, Body: []hlo.Instruction{
		{Opcode: "parameter", Results: sized(1000)},
		{Opcode: "dynamic-slice", Operands: []int{0}, Results: sized(100)},
		{Opcode: "parameter", Results: sized(200)},
		{Opcode: "custom-call", Target: "__cublas$lt$matmul", Operands: []int{1, 2}, Results: sized(50, 1<<25), FLOPs: 7},
		{Opcode: "get-tuple-element", Operands: []int{3}, Index: 0, Results: sized(50)},
		{Opcode: "parameter", Results: sized(400)},
		{Opcode: "dynamic-update-slice", Operands: []int{5, 4}, Results: sized(400)},
		{Opcode: "get-tuple-element", Operands: []int{3}, Index: 1, Results: sized(1 << 25)},
		{Opcode: "tuple", Operands: []int{6, 7}, Results: sized(400, 1<<25)},
	}}
	fusion := &hlo.Instruction{Opcode: "fusion", Calls: []*hlo.Computation{inner}}
	if got := costOf(&hlo.Computation{Body: []hlo.Instruction{*fusion}}, fusion).bytes; got != 100+200+50 {
		t.Errorf("%d bytes, want 350", got)
	}
	if call := libraryCall(fusion); call == nil || call.Target != "__cublas$lt$matmul" {
		t.Errorf("the call is %v", call)
	}
	inner.Body[3].Target = ""
	if call := libraryCall(fusion); call != nil {
		t.Errorf("%v is no library call", call)
	}
}
