package fused_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	codec "github.com/deepwell/deepwell/dtype/block"
	"github.com/deepwell/deepwell/kernels/fused"
	"github.com/deepwell/deepwell/kernels/triton"
	"github.com/deepwell/deepwell/kernels/triton/run"
)

// A placed is a matrix and where it stands in the whole, for what the codec makes of it.
type placed struct {
	fused.Matrix
	fused.NVFP4Form
	x          []uint16
	amax       [2]float32
	seed, step int32
	layer      int32
	row, col   int32 // the places of the first row and column
}

// mild is a matrix of numbers of a few sizes, whose transform is exact: with zeros in places, and
// NaNs where asked for.
func mild(r *rand.Rand, n int, nan bool) []uint16 {
	x := make([]uint16, n)
	for i := range x {
		x[i] = dtype.BF16FromF32(float32(r.IntN(255)-127) / 32)
		if i/160%7 == 3 {
			x[i] = 0
		}
	}
	if nan {
		x[r.IntN(n)] = 0xffc1
		x[r.IntN(n)] = 0x7fc0
	}
	return x
}

// operands gives the kernel's operands in their order.
func (f *placed) operands() [][]byte {
	n := f.Rows * f.Cols
	all := slices.Clone(f.x)
	f.amax[0] = codec.Amax(all)
	for batch := range f.Batch {
		f.amax[1] = larger(f.amax[1], codec.Amax(f.transposed(all[batch*n:][:n])))
	}
	list := [][]byte{words(f.x)}
	if f.Along || f.Tile {
		list = append(list, binary.LittleEndian.AppendUint32(nil, math.Float32bits(f.amax[0])))
	}
	if f.Across && !f.Tile {
		list = append(list, binary.LittleEndian.AppendUint32(nil, math.Float32bits(f.amax[1])))
	}
	if f.Stochastic != [2]bool{} {
		list = append(list, ints(f.seed, f.step, f.layer), count(f.row, f.Batch*f.Rows),
			count(f.col, f.Cols))
	}
	return list
}

func larger(x, y float32) float32 {
	if x != x || x > y {
		return x
	}
	return y
}

func count(from int32, n int) []byte {
	list := make([]int32, n)
	for i := range list {
		list[i] = from + int32(i)
	}
	return ints(list...)
}

// transposed is what blocks along columns are made of.
func (f *placed) transposed(x []uint16) []uint16 {
	out := make([]uint16, len(x))
	if err := codec.Transpose(out, x, f.Rows, f.Cols); err != nil {
		panic(err)
	}
	if !f.Tile {
		if err := codec.Hadamard(out, out); err != nil {
			panic(err)
		}
	}
	return out
}

// want is what the codec gives for one matrix of the batch: codes and scales along rows, and along
// columns.
func (f *placed) want(t *testing.T, batch int) (list [4][]byte) {
	t.Helper()
	n := f.Rows * f.Cols
	list = [4][]byte{make([]byte, n/2), make([]byte, n/16), make([]byte, n/2), make([]byte, n/16)}
	x := f.x[batch*n:][:n]
	var err error
	key := func(i int) codec.Key {
		return codec.NewKey(uint32(f.seed), uint32(f.step), uint32(f.layer)*64+uint32(f.Tensors[0][i]))
	}
	first := f.row + int32(batch*f.Rows)
	if f.Along {
		switch {
		case f.Stochastic[0]:
			err = codec.Stochastic(list[0], list[1], x, f.amax[0], key(0), codec.Window{Row: uint32(first),
				Col: uint32(f.col), Cols: f.Cols})
		case f.Tile:
			err = codec.NVFP4Tiles(list[0], list[1], x, f.Rows, f.Cols, f.amax[0])
		default:
			err = codec.NVFP4(list[0], list[1], x, f.amax[0])
		}
	}
	if f.Across {
		h := f.transposed(x)
		switch {
		case f.Tile:
			err = errors.Join(err, codec.NVFP4Tiles(list[2], list[3], h, f.Cols, f.Rows, f.amax[0]))
		default:
			err = errors.Join(err, codec.NVFP4(list[2], list[3], h, f.amax[1]))
		}
		if f.Stochastic[1] {
			f.dither(list[2], list[3], h, key(1), first)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// dither rounds blocks along columns by the places of the matrix, not of its transpose.
func (f *placed) dither(q, scales []byte, h []uint16, key codec.Key, first int32) {
	_, back := codec.Global(f.amax[1])
	for i, w := range h {
		factor := min(1/(dtype.F32FromE4M3(scales[i/16])*back), math.MaxFloat32)
		draw := key.Draw(uint32(first)+uint32(i%f.Rows/4*4), uint32(f.col)+uint32(i/f.Rows))
		code := codec.Round(dtype.F32FromBF16(w)*factor, i%4, draw)
		q[i/2] = q[i/2]&^(15<<(4*(i%2))) | code<<(4*(i%2))
	}
}

// check runs a kernel and compares all bytes.
func (f *placed) check(t *testing.T) {
	t.Helper()
	s := source(t, "quantize")
	k, err := fused.NVFP4(f.Matrix, s, f.NVFP4Form)
	if err != nil {
		t.Fatal(err)
	}
	in := f.operands()
	all := arrays(k, in...)
	if err := run.Kernel(k, all); err != nil {
		t.Fatal(err)
	}
	for batch := range f.Batch {
		want := f.want(t, batch)
		at := len(in)
		for i, name := range []string{"codes", "scales", "codes of columns", "scales of columns"} {
			if i < 2 && !f.Along || i >= 2 && !f.Across {
				continue
			}
			got := all[at]
			at++
			rows, cols := f.Rows, f.Cols
			if i >= 2 {
				rows, cols = cols, rows
			}
			if i%2 == 1 && f.Swizzled {
				got = unswizzled(got, f.Batch*rows, cols/16)
			}
			got = got[batch*len(want[i]):][:len(want[i])]
			if n, first := differ(got, want[i]); n > 0 {
				t.Errorf("matrix %d: %d of %d %s differ, the first at %d: %#x, want %#x", batch, n, len(got),
					name, first, got[first], want[i][first])
			}
		}
	}
}

// forms are all ways to write a matrix.
func forms() (list []fused.NVFP4Form) {
	for _, o := range [][2]bool{{true, false}, {false, true}, {true, true}} {
		for _, swizzled := range []bool{false, true} {
			f := fused.Form{Along: o[0], Across: o[1], Swizzled: swizzled}
			list = append(list, fused.NVFP4Form{Form: f, Tile: true})
			for _, stochastic := range [][2]bool{{}, {true, false}, {false, true}, {true, true}} {
				if stochastic[0] && !o[0] || stochastic[1] && !o[1] {
					continue
				}
				for _, added := range []bool{false, true} {
					if added && stochastic == [2]bool{} {
						continue
					}
					list = append(list, fused.NVFP4Form{Form: f, Stochastic: stochastic, Tensors: [][2]int{{6, 7}}, Added: added})
				}
			}
		}
	}
	return list
}

// Every form writes the bytes of dtype/block, for matrices with tiles partly outside, of one block
// of rows, with zeros, NaNs and subnormal numbers, and for batches.
func TestNVFP4Forms(t *testing.T) {
	r := rand.New(rand.NewPCG(22, 11))
	for i, m := range []fused.Matrix{{1, 128, 256}, {1, 16, 128}, {1, 48, 80}, {3, 128, 160}, {2, 160, 288}, {2, 128, 128},
		{1, 32, 16}, {1, 112, 512}} {
		for _, form := range forms() {
			if form.Swizzled && m.Batch > 1 && (form.Along && m.Rows%128 != 0 || form.Across && m.Cols%128 != 0) {
				if _, err := fused.NVFP4(m, source(t, "quantize"), form); err == nil {
					t.Errorf("%v is taken, %+v", m, form)
				}
				continue
			}
			name := fmt.Sprintf("%v/%+v", m, form)
			t.Run(name, func(t *testing.T) {
				f := &placed{Matrix: m, NVFP4Form: form, x: mild(r, m.Batch*m.Rows*m.Cols, i == 2), seed: 5,
					step: -7, layer: 3, row: 1000, col: 64}
				if i == 4 { // sums of subnormal numbers are exact, too
					for k := range f.x {
						f.x[k] = uint16(r.IntN(100)) | uint16(r.IntN(2))<<15
					}
				}
				f.check(t)
			})
		}
	}
}

// Along rows, where nothing is summed, numbers of all sizes give the codec's bytes.
func TestNVFP4StochasticOfHostileRows(t *testing.T) {
	r := rand.New(rand.NewPCG(22, 12))
	for _, d := range slices.Concat(shapes, oddShapes, [][2]int{{1, 256}, {50, 48}}) {
		for _, added := range []bool{false, true} {
			x := hostile(r, d[0], d[1])
			if d[1]%96 != 0 { // else a NaN is the tensor's scale, and everywhere
				for i, w := range x {
					if w&0x7f80 == 0x7f80 {
						x[i] = 0
					}
				}
			}
			f := &placed{Matrix: fused.Matrix{Batch: 1, Rows: d[0], Cols: d[1]}, x: x, seed: 1, step: 2,
				NVFP4Form: fused.NVFP4Form{Form: fused.Form{Along: true}, Stochastic: [2]bool{true},
					Tensors: [][2]int{{0, 0}}, Added: added}}
			k, err := fused.NVFP4(f.Matrix, source(t, "quantize"), f.NVFP4Form)
			if err != nil {
				t.Fatal(err)
			}
			f.amax[0] = codec.Amax(x)
			in := [][]byte{words(x), binary.LittleEndian.AppendUint32(nil, math.Float32bits(f.amax[0])),
				ints(1, 2, 0), count(0, d[0]), count(0, d[1])}
			all := arrays(k, in...)
			if err := run.Kernel(k, all); err != nil {
				t.Fatal(err)
			}
			want := f.want(t, 0)
			for i, got := range all[len(in):] {
				if n, at := differ(got, want[i]); n > 0 {
					t.Errorf("%v, added %v: %d of %d bytes of result %d differ, the first at %d: %#x, want %#x", d,
						added, n, len(got), i, at, got[at], want[i][at])
				}
			}
		}
	}
}

// Each part of a source has its own scales and random bits.
func TestNVFP4StochasticParts(t *testing.T) {
	r, s := rand.New(rand.NewPCG(22, 16)), source(t, "swiglu_grad")
	form := fused.NVFP4Form{Form: fused.Form{Along: true, Across: true}, Stochastic: [2]bool{true, true},
		Tensors: [][2]int{{8, 9}, {10, 11}}}
	for _, d := range [][2]int{{64, 160}, {128, 256}} {
		in, at := operands(r, s, d[0], d[1])
		y := computed(t, s, d[0], d[1], in, at)
		k, err := fused.NVFP4(fused.Matrix{Rows: d[0], Cols: d[1]}, s, form)
		if err != nil {
			t.Fatal(err)
		}
		var parts []*placed
		for p := range s.Parts {
			f := &placed{Matrix: fused.Matrix{Batch: 1, Rows: d[0], Cols: d[1]}, NVFP4Form: form, seed: 3, row: 7}
			f.Tensors = form.Tensors[p : p+1]
			f.x = y[p]
			parts = append(parts, f)
			in = append(in, f.operands()[1:3]...)
		}
		in = append(in, parts[0].operands()[3:]...)
		all := arrays(k, in...)
		if err := run.Kernel(k, all); err != nil {
			t.Fatal(err)
		}
		for p, f := range parts {
			for i, want := range f.want(t, 0) {
				got := all[len(in)+4*p+i]
				if n, _ := differ(got, want); float64(n) > mostFlips*float64(len(got)) {
					t.Errorf("%v: part %d: %d of %d bytes of result %d differ", d, p, n, len(got), i)
				}
			}
		}
	}
	form.Tensors = form.Tensors[:1]
	if _, err := fused.NVFP4(fused.Matrix{Rows: 64, Cols: 160}, s, form); err == nil {
		t.Error("a part without a number is taken")
	}
}

// Errors that are planted in the text of a stochastic kernel are found.
func TestPlantedErrorsOfStochasticRounding(t *testing.T) {
	for _, added := range []bool{false, true} {
		f := &placed{Matrix: fused.Matrix{Batch: 1, Rows: 64, Cols: 160}, seed: 9, step: 4, layer: 2, row: 64,
			x: mild(rand.New(rand.NewPCG(22, 13)), 64*160, false), NVFP4Form: fused.NVFP4Form{
				Form: fused.Form{Along: true, Across: true}, Stochastic: [2]bool{true, true},
				Tensors: [][2]int{{0, 1}}, Added: added}}
		k, err := fused.NVFP4(f.Matrix, source(t, "quantize"), f.NVFP4Form)
		if err != nil {
			t.Fatal(err)
		}
		edits := [][3]string{
			{"hash", "dense<13> : tensor<32x32xi32>", "dense<12> : tensor<32x32xi32>"},
			{"place", "dense<4> : tensor<8xi32>", "dense<2> : tensor<8xi32>"},
			{"tensor", "arith.constant 64 : i32", "arith.constant 63 : i32"},
		}
		if added {
			edits = append(edits, [3]string{"bits", "dense<4177920>", "dense<2080768>"})
		}
		for _, c := range edits {
			bad := *k
			if bad.Text = strings.ReplaceAll(k.Text, c[1], c[2]); bad.Text == k.Text {
				t.Errorf("%s: the text has no %q", c[0], c[1])
				continue
			}
			if n := wrong(t, f, &bad); n == 0 {
				t.Errorf("%s: the error is not found", c[0])
			}
		}
		if n := wrong(t, f, k); n > 0 {
			t.Errorf("%d bytes differ of a kernel without an error", n)
		}
	}
}

// wrong counts the bytes that differ.
func wrong(t *testing.T, f *placed, k *triton.Kernel) (n int) {
	t.Helper()
	in := f.operands()
	all := arrays(k, in...)
	if err := run.Kernel(k, all); err != nil {
		t.Log(err)
		return 1
	}
	want := f.want(t, 0)
	for i, got := range all[len(in):] {
		d, _ := differ(got, want[i])
		n += d
	}
	return n
}

// Partial maxima are the codec's largest magnitudes, NaN and infinity included.
func TestAmax(t *testing.T) {
	r := rand.New(rand.NewPCG(22, 14))
	for _, m := range []fused.Matrix{{1, 128, 256}, {1, 16, 16}, {1, 48, 80}, {3, 64, 160}, {1, 160, 512}} {
		for _, nan := range []bool{false, true} {
			k, err := fused.Amax(m, source(t, "quantize"), both)
			if err != nil {
				t.Fatal(err)
			}
			f := &placed{Matrix: m, x: mild(r, m.Batch*m.Rows*m.Cols, nan)}
			in := [][]byte{words(f.x)}
			all := arrays(k, in...)
			if err := run.Kernel(k, all); err != nil {
				t.Fatal(err)
			}
			f.Across = true
			f.operands()
			for i, want := range f.amax {
				var most uint32
				for k := 0; k < len(all[1+i]); k += 4 {
					most = max(most, binary.LittleEndian.Uint32(all[1+i][k:]))
				}
				got := math.Float32frombits(most)
				if got != want && (got == got || want == want) {
					t.Errorf("%v, %d: %v, want %v", m, i, got, want)
				}
			}
		}
	}
}
