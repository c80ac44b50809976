package model

import (
	"math"
	"slices"
	"testing"
)

// The vectors are Random123's own (kat_vectors, philox4x32-10).
func TestPhilox(t *testing.T) {
	for _, c := range []struct {
		counter [4]uint32
		key     [2]uint32
		want    [4]uint32
	}{
		{[4]uint32{}, [2]uint32{}, [4]uint32{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
		{[4]uint32{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, [2]uint32{0xffffffff, 0xffffffff},
			[4]uint32{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
		{[4]uint32{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, [2]uint32{0xa4093822, 0x299f31d0},
			[4]uint32{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
	} {
		if got := philox(c.counter, c.key); got != c.want {
			t.Errorf("%08x with key %08x gives %08x, not %08x", c.counter, c.key, got, c.want)
		}
	}
}

// The series agree with package math to far below the last bit of a float32.
func TestSeries(t *testing.T) {
	const bound = 2e-10
	words := []uint32{0, 1, 2, 1<<29 - 1, 1 << 29, 1<<30 - 1, 1 << 30, 1<<31 - 1, 1 << 31, 3 << 30, 1<<32 - 2, 1<<32 - 1}
	for i := range uint32(20000) {
		words = append(words, i*214013+i*i*2531011)
	}
	for _, x := range words {
		u := (float64(x) + 0.5) / (1 << 32)
		if got, want := minusLog(x), -math.Log(u); !(math.Abs(got-want) <= bound*max(want, 1)) || !(got > 0) {
			t.Errorf("-log %v is %v, not %v", u, got, want)
		}
		s, c := sinCos(x)
		ws, wc := math.Sincos(2 * math.Pi * u)
		if math.Abs(s-ws) > bound || math.Abs(c-wc) > bound {
			t.Errorf("at %v: %v, %v, not %v, %v", u, s, c, ws, wc)
		}
	}
}

// The first four moments of a million numbers, and the tails, match a normal distribution;
// bounds are five deviations of each estimate.
func TestInitMoments(t *testing.T) {
	const n = 1 << 20
	x := make([]float32, n)
	newStream(7, "w", 1).normals(x, 0)
	var mean, second, third, fourth, pairs float64
	beyond := 0
	for i, v := range x {
		f := float64(v)
		mean, second, third, fourth = mean+f/n, second+f*f/n, third+f*f*f/n, fourth+f*f*f*f/n
		pairs += f * float64(x[(i+1)%n]) / n
		if math.Abs(f) > 3 {
			beyond++
		}
	}
	for _, c := range []struct {
		name              string
		got, want, spread float64 // spread is the deviation of one term
	}{
		{"mean", mean, 0, 1}, {"second moment", second, 1, math.Sqrt(2)}, {"third", third, 0, math.Sqrt(15)},
		{"fourth", fourth, 3, math.Sqrt(96)}, {"product of neighbours", pairs, 0, 1},
		{"beyond 3", float64(beyond) / n, 0.0026998, math.Sqrt(0.0026998)},
	} {
		if bound := 5 * c.spread / math.Sqrt(n); math.Abs(c.got-c.want) > bound {
			t.Errorf("%s is %v, not %v ± %.2g", c.name, c.got, c.want, bound)
		}
	}
}

// Known values: a change here changes every run that begins from random weights.
func TestInitValues(t *testing.T) {
	p, err := Find("gpt2")
	if err != nil {
		t.Fatal(err)
	}
	c := *p.Config
	c.Layers, c.Hidden, c.MLP, c.Heads, c.KVHeads, c.HeadDim, c.Vocab = 2, 4, 8, 2, 2, 2, 5
	for _, p := range c.Params() {
		dst := make([]float32, p.Size())
		if err := c.Init(&p, 1, dst); err != nil {
			t.Fatal(err)
		}
		if want, ok := initValues[p.Name]; ok && !slices.Equal(dst[:4], want) {
			t.Errorf("%s begins %v, not %v", p.Name, dst[:4], want)
		}
	}
}

var initValues = map[string][]float32{
	"embed":        {-0.014469095, -0.015480241, -0.03061696, -0.019083729},
	"position":     {-0.020495746, 0.021644691, 0.009319255, -0.022277985},
	"block.norm1":  {1, 1, 1, 1},
	"block.q":      {-0.0112567935, -0.014237941, 0.019994004, -0.00132054},
	"block.k":      {-0.009137852, -0.016516292, 0.023251984, 0.0004589305},
	"block.v":      {0.0044257347, -0.020890249, 0.024043782, 0.009828862},
	"block.v.bias": {0, 0, 0, 0},
	"block.o":      {-0.005947837, -0.01067318, -0.006933422, -0.012389382},
	"block.down":   {-0.002263862, 0.0037431957, -0.0023117703, -0.0076176166},
}

// Every layout of a model's weights begins from the same tensors: stacked, layer by layer, and in
// families that keep the same weights in other tensors or transposed.
func TestInitIsOfTheTensor(t *testing.T) {
	for _, name := range []string{"gpt2", "llama3-8b", "gemma2-2b", "phi3-mini", "nemotron-8b",
		"mixtral-8x7b", "olmoe-1b-7b", "gpt-oss-20b", "qwen3-30b-a3b"} {
		preset, err := Find(name)
		if err != nil {
			t.Fatal(err)
		}
		c := *preset.Config
		c.Layers, c.Hidden, c.MLP, c.Heads, c.KVHeads, c.HeadDim, c.Vocab, c.Context = 4, 66, 130, 6, 2, 11, 70, 9
		c.Windowed = slices.Clone(c.Windowed[:min(4, len(c.Windowed))])
		if c.Learned {
			c.KVHeads = 6
		}
		if c.MoE != nil {
			experts := *c.MoE
			experts.Experts, experts.MLP, c.MoE = 8, 13, &experts
		}
		for _, p := range c.Params() {
			whole := make([]float32, p.Size())
			if err := c.Init(&p, 42, whole); err != nil {
				t.Fatal(err)
			}
			for i, layer := range p.Layers() {
				got := make([]float32, layer.Size())
				if err := c.Init(&layer, 42, got); err != nil {
					t.Fatal(err)
				}
				if !slices.Equal(got, whole[int64(i)*layer.Size():][:layer.Size()]) {
					t.Errorf("%s: %s differs from its place in the stack", name, layer.Name)
				}
				if layer.HasExperts() {
					some := layer.SliceExperts(3, 5)
					part := make([]float32, some.Size())
					if err := c.Init(&some, 42, part); err != nil {
						t.Fatal(err)
					}
					if !slices.Equal(part, got[3*layer.Size()/8:][:layer.Size()/4]) {
						t.Errorf("%s: experts 3 and 4 of %s differ", name, layer.Name)
					}
				}
			}
			std := initStd
			if p.ends() {
				std /= math.Sqrt(8)
			}
			var streams []*stream
			for _, tensor := range p.Tensors() {
				streams = append(streams, newStream(42, tensor, std))
			}
			for i, got := range whole {
				k, j := p.Forward(int64(i))
				want := float32(0)
				if !p.Vector() {
					one := [1]float32{}
					streams[k].normals(one[:], j)
					want = one[0]
				} else if p.Source[len(p.Source)-6:] == "weight" {
					want = float32(1 - c.Norm.Shift)
				}
				if got != want {
					t.Fatalf("%s: element %d of %s is %v, not %v", name, i, p.Name, got, want)
				}
			}
		}
	}
}

// What ends a layer is found in every family: two tensors a layer.
func TestInitEnds(t *testing.T) {
	for _, preset := range Presets() {
		c := preset.Config
		if c == nil {
			continue
		}
		n := int64(0)
		for _, p := range c.Params() {
			for _, layer := range p.Layers() {
				if layer.ends() != p.ends() {
					t.Errorf("%s: %s and %s", preset.Name, p.Name, layer.Name)
				}
				if p.ends() && !p.Vector() {
					n++
				}
			}
		}
		if c.MoE == nil && n != 2*c.Layers {
			t.Errorf("%s: %d of %d layers' ends", preset.Name, n, c.Layers)
		}
	}
}

func TestInitWantsTheRightSize(t *testing.T) {
	p, _ := Find("gpt2")
	params := p.Config.Params()
	if p.Config.Init(&params[0], 1, make([]float32, 3)) == nil {
		t.Error("a buffer of 3 elements is taken")
	}
}

func BenchmarkInit(b *testing.B) {
	p, _ := Find("llama3.1-8b")
	for _, param := range p.Config.Params() {
		if param.Name != "block.q" && param.Name != "block.down" {
			continue
		}
		one := param.Layers()[0]
		dst := make([]float32, one.Size())
		b.Run(param.Name, func(b *testing.B) {
			for b.Loop() {
				if err := p.Config.Init(&one, 1, dst); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(one.Size())*float64(b.N)/b.Elapsed().Seconds()/1e6, "Melements/s")
		})
	}
}
