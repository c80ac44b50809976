package fused_test

import (
	"bytes"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/deepwell/deepwell/kernels/fused"
	"github.com/deepwell/deepwell/kernels/triton"
	"github.com/deepwell/deepwell/kernels/triton/run"
)

// Each layer of a stack has its own largest magnitude, whatever its matrices are.
func TestNVFP4Layers(t *testing.T) {
	r := rand.New(rand.NewPCG(22, 17))
	for _, form := range []fused.NVFP4Form{{Form: fused.Form{Along: true, Across: true}, Tile: true},
		{Form: fused.Form{Along: true, Across: true}}} {
		form.Layers = 2
		m := fused.Matrix{Batch: 6, Rows: 32, Cols: 160}
		n := m.Rows * m.Cols
		k, err := fused.NVFP4(m, source(t, "quantize"), form)
		if err != nil {
			t.Fatal(err)
		}
		known(t, k)
		var parts []*placed
		var x []uint16
		amax := [2][]byte{}
		for layer := range form.Layers {
			f := &placed{Matrix: fused.Matrix{Batch: 3, Rows: m.Rows, Cols: m.Cols}, NVFP4Form: form,
				x: mild(r, 3*n, false)}
			if layer == 1 {
				for i := range f.x[:200] {
					f.x[i] = 0x42c8 // 100
				}
			}
			f.operands()
			for i, v := range f.amax {
				amax[i] = binary.LittleEndian.AppendUint32(amax[i], math.Float32bits(v))
			}
			parts, x = append(parts, f), append(x, f.x...)
		}
		in := [][]byte{words(x), amax[0], amax[1]}
		if form.Tile {
			in = in[:2]
		}
		all := arrays(k, in...)
		if err := run.Kernel(k, all); err != nil {
			t.Fatal(err)
		}
		for batch := range m.Batch {
			for i, want := range parts[batch/3].want(t, batch%3) {
				got := all[len(in)+i][batch*len(want):][:len(want)]
				if d, at := differ(got, want); d > 0 {
					t.Errorf("tile %v, matrix %d: %d of %d bytes of result %d differ, the first at %d", form.Tile,
						batch, d, len(got), i, at)
				}
			}
		}
	}
	if _, err := fused.NVFP4(fused.Matrix{Batch: 3, Rows: 16, Cols: 16}, source(t, "quantize"),
		fused.NVFP4Form{Form: fused.Form{Along: true}, Layers: 2}); err == nil {
		t.Error("three matrices of two layers are taken")
	}
}

// known tells that the specification of a kernel is read as it is printed.
func known(t *testing.T, k *triton.Kernel) {
	t.Helper()
	operands := 0
	for _, a := range k.Args {
		if a.Name == "round" || a.Result {
			break
		}
		operands++
	}
	if s, err := fused.ParseSpec(k.Spec); err != nil || s.String() != k.Spec || s.Operands() != operands {
		t.Errorf("%q is %q with %d of %d operands, %v", k.Spec, s, s.Operands(), operands, err)
	}
}

// Kernels of NVFP4 in a loop keep what they compute, read one round of stacks and write one: the
// same bytes as without stacks, and what other rounds have stays.
func TestStacksOfNVFP4(t *testing.T) {
	const rounds, round = 3, 1
	r, s := rand.New(rand.NewPCG(22, 18)), source(t, "swiglu")
	m := fused.Matrix{Batch: 1, Rows: 96, Cols: 160}
	in, _ := operands(r, s, m.Rows, m.Cols)
	plain := fused.Form{Along: true, Across: true, Keep: true}
	stacked := plain
	stacked.Stacks = fused.Stacks{Rounds: rounds, From: []int{1}, Saved: []int{0}, Into: []int{0}}
	amax := binary.LittleEndian.AppendUint32(nil, math.Float32bits(90))
	for name, c := range map[string]struct {
		kernel func(fused.Form) (*triton.Kernel, error)
		beside [][]byte
	}{
		"amax": {func(f fused.Form) (*triton.Kernel, error) { return fused.Amax(m, s, f) }, nil},
		"nvfp4": {func(f fused.Form) (*triton.Kernel, error) {
			return fused.NVFP4(m, s, fused.NVFP4Form{Form: f, Stochastic: [2]bool{true, true},
				Tensors: [][2]int{{4, 5}}})
		}, [][]byte{amax, amax, ints(1, 2, 3), count(0, m.Rows), count(0, m.Cols)}},
	} {
		one, err := c.kernel(plain)
		if err != nil {
			t.Fatal(err)
		}
		known(t, one)
		given := append(append([][]byte{}, in...), c.beside...)
		want := arrays(one, given...)
		if err := run.Kernel(one, want); err != nil {
			t.Fatal(err)
		}
		k, err := c.kernel(stacked)
		if err != nil {
			t.Fatal(err)
		}
		known(t, k)
		n := 2 * m.Rows * m.Cols
		stack := func(part []byte) []byte {
			all := bytes.Repeat([]byte{7}, n*rounds)
			copy(all[n*round:], part)
			return all
		}
		given = append(append([][]byte{in[0], stack(in[1])}, c.beside...), []byte{round, 0, 0, 0})
		all := arrays(k, append(given, stack(nil), stack(nil))...)
		if err := run.Kernel(k, all); err != nil {
			t.Fatal(err)
		}
		got := all[len(given)+2:]
		expected := append(append([][]byte{stack(want[len(in)+len(c.beside)])}, want[len(in)+len(c.beside)+1:]...),
			stack(in[0]))
		for i, w := range expected {
			if d, at := differ(got[i], w); d > 0 || len(got[i]) != len(w) {
				t.Errorf("%s: %d of %d bytes of result %d differ, the first at %d", name, d, len(w), i, at)
			}
		}
	}
}

// A batch whose scales are no whole tiles of either orientation is refused.
func TestSwizzledBatches(t *testing.T) {
	for _, m := range []fused.Matrix{{2, 96, 128}, {2, 128, 96}} {
		if _, err := fused.MXFP8(m, source(t, "quantize"), both); err == nil {
			t.Errorf("%v is taken", m)
		}
	}
	for _, f := range []fused.Form{{Along: true, Swizzled: true}, {Across: true, Swizzled: true}} {
		m := fused.Matrix{Batch: 2, Rows: 128, Cols: 96}
		if f.Across {
			m.Rows, m.Cols = 96, 128
		}
		if _, err := fused.MXFP8(m, source(t, "quantize"), f); err != nil {
			t.Errorf("%v: %v", m, err)
		}
	}
}
