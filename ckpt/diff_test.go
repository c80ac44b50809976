package ckpt

import (
	"math"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/deepwell/deepwell/dtype"
)

func floats(b []byte, v ...float32) { dtype.F32.Encode(b, v) }

func TestDiff(t *testing.T) {
	tensors := []Tensor{{"w", dtype.F32, []int64{2, 2}}, {"same", dtype.F32, []int64{3}},
		{"i", dtype.S8, []int64{2}}, {"zero", dtype.F32, []int64{1}}, {"p", dtype.F4E2M1FN, []int64{2}}}
	a, b := state(t, 5, tensors...), state(t, 5, tensors...)
	floats(a.Bytes("w"), 1, 2, float32(math.NaN()), -4)
	floats(b.Bytes("w"), 1, 2.5, 0, 4)
	copy(a.Bytes("i"), []byte{0xff, 7})
	copy(b.Bytes("i"), []byte{1, 7})
	floats(a.Bytes("zero"), 0)
	floats(b.Bytes("zero"), float32(math.Copysign(0, -1)))
	a.Bytes("p")[0], b.Bytes("p")[0] = 1, 2
	for m, x := range map[*Memory]Tensor{a: {"gone", dtype.F32, nil}, b: {"new", dtype.F32, nil}} {
		if _, err := m.Add(x); err != nil {
			t.Fatal(err)
		}
	}
	want := []Difference{
		{Name: "gone", A: "f32[]"},
		{Name: "i", A: "s8[2]", B: "s8[2]", Elements: 1, MaxAbs: 2, MaxRel: 2},
		{Name: "new", B: "f32[]"},
		{Name: "p", A: "f4e2m1fn[2]", B: "f4e2m1fn[2]", Elements: 1, NoValue: 1},
		{Name: "w", A: "f32[2,2]", B: "f32[2,2]", Elements: 3, MaxAbs: 8, MaxRel: 2, NoValue: 1},
		{Name: "zero", A: "f32[1]", B: "f32[1]", Elements: 1},
	}
	got, err := Diff(t.Context(), a, b)
	if d := cmp.Diff(want, got); err != nil || d != "" {
		t.Errorf("%v (-want +got):\n%s", err, d)
	}
	// The same through checkpoints, where hashes answer for what is equal.
	dir := t.TempDir()
	must(t, Save(t.Context(), dir, 1, Meta{}, a, Options{}))
	must(t, Save(t.Context(), dir, 2, Meta{}, b, Options{}))
	ca, err := Open(filepath.Join(dir, stepName(1)))
	must(t, err)
	defer ca.Close()
	cb, err := Open(filepath.Join(dir, stepName(2)))
	must(t, err)
	defer cb.Close()
	got, err = Diff(t.Context(), ca, cb)
	if d := cmp.Diff(want, got); err != nil || d != "" {
		t.Errorf("%v (-want +got):\n%s", err, d)
	}
	if got, err := Diff(t.Context(), ca, ca); err != nil || len(got) > 0 {
		t.Errorf("a checkpoint differs from itself: %v %v", got, err)
	}
}
