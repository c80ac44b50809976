package ckpt

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/safetensors"
)

// code is what errors.Is compares with.
func wantCode(t testing.TB, err error, c diag.Code) *diag.Error {
	t.Helper()
	if !errors.Is(err, c) {
		t.Fatalf("error %v, want %s", err, c)
	}
	return diag.From(err)
}

// state makes tensors of known bytes.
func state(t testing.TB, seed uint64, tensors ...Tensor) *Memory {
	t.Helper()
	m := &Memory{}
	r := rand.New(rand.NewPCG(seed, 1))
	for _, x := range tensors {
		b, err := m.Add(x)
		if err != nil {
			t.Fatal(err)
		}
		for i := range b {
			b[i] = byte(r.Uint32())
		}
	}
	return m
}

// small is a state with something of everything: stacks, vectors, a scalar, packed elements and a
// tensor without elements.
func small() []Tensor {
	return []Tensor{
		{"embed", dtype.F32, []int64{12, 4}},
		{"block.q.0", dtype.F32, []int64{4, 4}},
		{"m.block.q.0", dtype.F32, []int64{4, 4}},
		{"norm", dtype.BF16, []int64{4}},
		{"scale", dtype.F32, nil},
		{"packed", dtype.F4E2M1FN, []int64{3, 4}},
		{"none", dtype.S32, []int64{0, 3}},
	}
}

func meta() Meta {
	return Meta{
		Data: map[string]int64{"wiki": 4096, "code": 17}, Seed: 1<<64 - 1,
		Random:   map[string][]byte{"dropout": {1, 2, 3}},
		Programs: map[string]string{"step": "sha256:abc", "update": "sha256:def"},
		Recipe:   "model = \"tiny\" # <&>\nlr = 3e-4\n",
		Engine:   json.RawMessage(`{"name": "cpu"}`),
		Model:    json.RawMessage("{\n  \"layers\": 2 }"),
		Extra:    map[string]json.RawMessage{"later": json.RawMessage(`[1, null]`)},
	}
}

// slow reads a box of a tensor element by element, the plainest way there is.
func slow(t Tensor, whole []byte, box Box) []byte {
	shape, b, width := slices.Clone(t.Shape), box, int64(t.DType.Bits()/8)
	if width == 0 { // two elements are one byte
		last := len(shape) - 1
		b = Box{slices.Clone(box.Start), slices.Clone(box.Size)}
		shape[last], b.Start[last], b.Size[last] = shape[last]/2, b.Start[last]/2, b.Size[last]/2
		width = 1
	}
	n := int64(1)
	for _, s := range b.Size {
		n *= s
	}
	var out []byte
	for e := range n {
		at, rest, stride := int64(0), e, int64(1)
		for i, d := range slices.Backward(shape) {
			at += (b.Start[i] + rest%b.Size[i]) * stride
			rest /= b.Size[i]
			stride *= d
		}
		out = append(out, whole[at*width:(at+1)*width]...)
	}
	return out
}

// genBox draws any box of a tensor, also an empty one.
func genBox(rt *rapid.T, t Tensor) Box {
	b := t.Box()
	for i, d := range t.Shape {
		unit := int64(1)
		if t.DType.Bits() < 8 && i == len(t.Shape)-1 {
			unit = 2
		}
		b.Start[i] = unit * rapid.Int64Range(0, d/unit).Draw(rt, "start")
		b.Size[i] = unit * rapid.Int64Range(0, (d-b.Start[i])/unit).Draw(rt, "size")
	}
	return b
}

// genSplits splits a box in two again and again.
func genSplits(rt *rapid.T, t Tensor, b Box, depth int) []Box {
	if len(b.Size) == 0 || depth == 0 || slices.Contains(b.Size, 0) {
		return []Box{b}
	}
	i := rapid.IntRange(0, len(b.Size)-1).Draw(rt, "along")
	unit := int64(1)
	if t.DType.Bits() < 8 && i == len(b.Size)-1 {
		unit = 2
	}
	if b.Size[i] < 2*unit {
		return []Box{b}
	}
	cut := unit * rapid.Int64Range(1, b.Size[i]/unit-1).Draw(rt, "split")
	left, right := Box{slices.Clone(b.Start), slices.Clone(b.Size)}, Box{slices.Clone(b.Start), slices.Clone(b.Size)}
	left.Size[i] = cut
	right.Start[i] += cut
	right.Size[i] -= cut
	return append(genSplits(rt, t, left, depth-1), genSplits(rt, t, right, depth-1)...)
}

func genTensors(rt *rapid.T) []Tensor {
	types := []dtype.DType{dtype.F32, dtype.BF16, dtype.F64, dtype.U8, dtype.Pred, dtype.F4E2M1FN,
		dtype.F8E4M3FN, dtype.S32}
	var list []Tensor
	for i := range rapid.IntRange(0, 5).Draw(rt, "tensors") {
		x := Tensor{Name: fmt.Sprintf("%c.%d", 'z'-i, i), DType: rapid.SampledFrom(types).Draw(rt, "type")}
		x.Shape = rapid.SliceOfN(rapid.Int64Range(0, 7), 0, 4).Draw(rt, "shape")
		if x.DType.Bits() < 8 {
			x.Shape = append(x.Shape, 2*rapid.Int64Range(0, 4).Draw(rt, "pairs"))
		}
		list = append(list, x)
	}
	return list
}

// What is read through any box equals what was written, whatever the boxes and writers were.
func TestAnyBoxFromAnyWriters(t *testing.T) {
	dir := t.TempDir()
	run := 0
	rapid.Check(t, func(rt *rapid.T) {
		run++
		tensors := genTensors(rt)
		src := state(t, uint64(run), tensors...)
		writers := make([][]Slice, rapid.IntRange(1, 4).Draw(rt, "writers"))
		for i := range writers {
			writers[i] = []Slice{}
		}
		for _, x := range tensors {
			for _, b := range genSplits(rt, x, x.Box(), 3) {
				w := rapid.IntRange(0, len(writers)-1).Draw(rt, "writer")
				writers[w] = append(writers[w], Slice{x.Name, b})
			}
		}
		o := Options{Workers: rapid.IntRange(1, 3).Draw(rt, "workers"),
			chunk: rapid.Int64Range(8, 64).Draw(rt, "chunk")}
		here := filepath.Join(dir, fmt.Sprint(run))
		writeAll(rt, here, src, writers, o)
		c, err := Open(filepath.Join(here, stepName(7)))
		if err != nil {
			rt.Fatal(err)
		}
		defer c.Close()
		if err := c.Verify(t.Context()); err != nil {
			rt.Fatal(err)
		}
		for _, x := range tensors {
			for range 3 {
				box := genBox(rt, x)
				got := make([]byte, x.sized(box.Size))
				if err := c.ReadSlice(x.Name, box, got); err != nil {
					rt.Fatal(err)
				}
				if want := slow(x, src.Bytes(x.Name), box); !bytes.Equal(got, want) {
					rt.Fatalf("%s %v: got %x, want %x", x.Name, box, got, want)
				}
			}
		}
		sameState(rt, c, src)
		samePartFiles(rt, c)
		if err := os.RemoveAll(here); err != nil {
			rt.Fatal(err)
		}
	})
}

func writeAll(t rapid.TB, dir string, src *Memory, writers [][]Slice, o Options) {
	d, err := Begin(context.Background(), dir, 7, o)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Abort()
	var wg sync.WaitGroup
	errs := make([]error, len(writers))
	for i, list := range writers {
		wg.Go(func() { errs[i] = d.Write(context.Background(), i, src, list) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	if err := d.Commit(context.Background(), meta()); err != nil {
		t.Fatal(err)
	}
}

// sameState reads a checkpoint into fresh memory and compares every byte.
func sameState(t rapid.TB, c *Checkpoint, want *Memory) {
	t.Helper()
	for _, x := range want.Tensors() {
		if have := byName(c.Tensors())[x.Name]; !have.same(x) {
			t.Fatalf("%s came back as %v", x.Name, have)
		}
		got := make([]byte, x.Bytes())
		if err := c.ReadSlice(x.Name, x.Box(), got); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want.Bytes(x.Name)) {
			t.Fatalf("%s came back changed", x.Name)
		}
	}
}

// samePartFiles holds the part files to the safetensors package: any tool can look into one.
func samePartFiles(t rapid.TB, c *Checkpoint) {
	t.Helper()
	for _, f := range c.Files {
		set, err := safetensors.Open(filepath.Join(c.Path(), f.Name))
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range c.Manifest.Tensors {
			for _, p := range x.Parts {
				if p.File != f.Name {
					continue
				}
				key := x.Name
				if !slices.Equal(p.Size, x.Shape) {
					key += p.String()
				}
				in, err := set.Tensor(key)
				if err != nil {
					t.Fatal(err)
				}
				got, want := make([]byte, in.Size()), make([]byte, p.Bytes)
				if _, err := in.ReadAt(got, 0); err != nil {
					t.Fatal(err)
				}
				if err := c.ReadSlice(x.Name, p.Box, want); err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(got, want) || in.Shape().Type != x.DType {
					t.Fatalf("safetensors reads %s otherwise", key)
				}
			}
		}
		set.Close()
	}
}

func TestChunksFollowEachOther(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		for _, x := range genTensors(rt) {
			m := state(t, 3, x)
			box := genBox(rt, x)
			limit := rapid.Int64Range(8, 100).Draw(rt, "limit")
			var got []byte
			for chunk := range x.chunks(box, limit) {
				n := x.sized(chunk.Size)
				if n == 0 || n > limit {
					rt.Fatalf("a chunk %v of %d bytes, limit %d", chunk, n, limit)
				}
				buf := make([]byte, n)
				if err := m.ReadSlice(x.Name, chunk, buf); err != nil {
					rt.Fatal(err)
				}
				got = append(got, buf...)
			}
			if want := slow(x, m.Bytes(x.Name), box); !bytes.Equal(got, want) {
				rt.Fatalf("chunks of %v: %x, want %x", box, got, want)
			}
		}
	})
}

func save(t testing.TB, dir string, step int64, o Options) *Memory {
	t.Helper()
	src := state(t, uint64(step), small()...)
	if err := Save(context.Background(), dir, step, meta(), src, o); err != nil {
		t.Fatal(err)
	}
	return src
}

func TestSaveAndLatest(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "run")
	_, err := Latest(t.Context(), dir, nil)
	wantCode(t, err, diag.CheckpointMissing)
	for step := int64(10); step <= 50; step += 10 {
		save(t, dir, step, Options{Keep: 3})
	}
	c, err := Latest(t.Context(), dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if c.Step != 50 || c.Seed != 1<<64-1 || c.Data["wiki"] != 4096 || c.Recipe != meta().Recipe {
		t.Errorf("got %+v", c.Manifest)
	}
	sameState(t, c, state(t, 50, small()...))
	list, err := List(dir)
	if err != nil || len(list) != 3 || list[0].Step != 30 || list[2].Tensors != len(small()) {
		t.Errorf("kept %+v, %v", list, err)
	}
	err = Save(t.Context(), dir, 50, Meta{}, state(t, 1, small()...), Options{})
	wantCode(t, err, diag.CheckpointExists)
	must(t, Save(t.Context(), dir, 50, meta(), state(t, 50, small()...), Options{})) // the same
	for _, row := range []struct {                                                   // each of several processes compares its slices
		with uint64
		want bool
	}{{50, true}, {49, false}} {
		src := state(t, row.with, small()...)
		var all []Slice
		for _, one := range src.Tensors() {
			all = append(all, Slice{one.Name, Box{make([]int64, len(one.Shape)), one.Shape}})
		}
		got, err := meta().Saved(t.Context(), dir, 50, src, all)
		none, err2 := meta().Saved(t.Context(), dir, 50, src, []Slice{})
		if got != row.want || !none || err != nil || err2 != nil {
			t.Errorf("state %d: %v, %v, %v, %v", row.with, got, none, err, err2)
		}
	}
	other := meta()
	other.Data = map[string]int64{"wiki": 4097}
	err = Save(t.Context(), dir, 50, other, state(t, 50, small()...), Options{})
	wantCode(t, err, diag.CheckpointExists)
}

// The same state gives the same bytes, however many workers wrote it.
func TestSameStateSameBytes(t *testing.T) {
	read := func(workers int) map[string]string {
		dir := t.TempDir()
		save(t, dir, 3, Options{Workers: workers, chunk: 16})
		got := map[string]string{}
		err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
			if err == nil && e.Type().IsRegular() && e.Name() != lockName {
				b, err := os.ReadFile(path)
				got[e.Name()] = string(b)
				return err
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	if a, b := read(1), read(4); !maps.Equal(a, b) || len(a) != 2 {
		t.Errorf("two saves of one state differ: %v and %v", a, b)
	}
}

// heard collects warnings.
type heard struct {
	mu   sync.Mutex
	list []event.Warning
}

func (h *heard) Emit(e event.Event) {
	if w, ok := e.(event.Warning); ok {
		h.mu.Lock()
		h.list = append(h.list, w)
		h.mu.Unlock()
	}
}

func TestReadSliceSays(t *testing.T) {
	dir := t.TempDir()
	save(t, dir, 1, Options{})
	c, err := Latest(t.Context(), dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	whole := Box{[]int64{0, 0}, []int64{12, 4}}
	for want, give := range map[string]func() error{
		`no tensor is called "embde"`: func() error {
			return c.ReadSlice("embde", whole, make([]byte, 192))
		},
		"takes 192 bytes, the buffer has 96": func() error {
			return c.ReadSlice("embed", whole, make([]byte, 96))
		},
	} {
		if e := wantCode(t, give(), diag.CheckpointTensor); !strings.Contains(e.What, want) {
			t.Errorf("%q does not say %q", e.What, want)
		}
	}
	for _, box := range []Box{{[]int64{0}, []int64{4}}, {[]int64{0, 2}, []int64{1, 3}},
		{[]int64{-1, 0}, []int64{1, 1}}, {[]int64{1 << 62, 0}, []int64{1 << 62, 1}}} {
		wantCode(t, c.ReadSlice("embed", box, make([]byte, 16)), diag.CheckpointTensor)
	}
	odd := Box{[]int64{0, 1}, []int64{1, 2}}
	wantCode(t, c.ReadSlice("packed", odd, make([]byte, 1)), diag.CheckpointTensor)
}

func TestWritersMustCover(t *testing.T) {
	x := Tensor{"w", dtype.F32, []int64{4, 4}}
	top, bottom := Box{[]int64{0, 0}, []int64{2, 4}}, Box{[]int64{2, 0}, []int64{2, 4}}
	left := Box{[]int64{0, 0}, []int64{4, 2}}
	for name, list := range map[string][]Slice{
		"a hole":          {{"w", top}},
		"an overlap":      {{"w", top}, {"w", left}},
		"one box twice":   {{"w", top}, {"w", top}, {"w", bottom}},
		"overlap of four": {{"w", top}, {"w", bottom}, {"w", left}},
	} {
		d, err := Begin(t.Context(), t.TempDir(), 1, Options{})
		if err != nil {
			t.Fatal(err)
		}
		err = d.Write(t.Context(), 0, state(t, 1, x), list)
		if err == nil {
			err = d.Commit(t.Context(), Meta{})
		}
		d.Abort()
		if !errors.Is(err, diag.CheckpointTensor) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
