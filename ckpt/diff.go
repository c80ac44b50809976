package ckpt

import (
	"bytes"
	"context"
	"maps"
	"math"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/human"
)

// A Difference is how one tensor of two sources differs; none is listed for a tensor that is
// bit-equal.
type Difference struct {
	Name string `json:"name"`
	A    string `json:"a,omitempty"` // type and shape; empty if only the other source has it
	B    string `json:"b,omitempty"`
	// Elements counts those whose bits differ. MaxAbs and MaxRel are the largest differences of
	// value among them, the latter as a share of the larger of the two. NoValue counts those that
	// have no difference: not a number or infinite on a side, or of a type that is only bits here.
	Elements int64   `json:"elements,omitempty"`
	MaxAbs   float64 `json:"max_abs"`
	MaxRel   float64 `json:"max_rel"`
	NoValue  int64   `json:"no_value,omitempty"`
}

// Comparable reports whether both sources have the tensor with one type and shape.
func (d Difference) Comparable() bool { return d.A == d.B }

// Diff compares two sources tensor by tensor, in the order of their names, a chunk at a time. Two
// checkpoints that shard a tensor in the same way are compared by their hashes.
func Diff(ctx context.Context, a, b Source) ([]Difference, error) {
	inA, inB := byName(a.Tensors()), byName(b.Tensors())
	all := maps.Clone(inA)
	maps.Copy(all, inB)
	var list []Difference
	for _, name := range slices.Sorted(maps.Keys(all)) {
		ta, okA := inA[name]
		tb, okB := inB[name]
		d := Difference{Name: name}
		if okA {
			d.A = ta.String()
		}
		if okB {
			d.B = tb.String()
		}
		if d.Comparable() {
			if sameHashes(a, b, name) {
				continue
			}
			if err := d.compare(ctx, ta, a, b); err != nil {
				return nil, err
			}
			if d.Elements == 0 {
				continue
			}
		}
		list = append(list, d)
	}
	return list, nil
}

// sameHashes reports whether both are checkpoints whose manifests prove a tensor equal.
func sameHashes(a, b Source, name string) bool {
	ca, okA := a.(*Checkpoint)
	cb, okB := b.(*Checkpoint)
	return okA && okB && slices.EqualFunc(ca.Manifest.Tensors[ca.place[name]].Parts,
		cb.Manifest.Tensors[cb.place[name]].Parts, func(p, q Part) bool {
			return slices.Equal(p.Start, q.Start) && slices.Equal(p.Size, q.Size) &&
				p.SHA256 == q.SHA256
		})
}

// compare reads a tensor from both sources, chunk by chunk, and counts what differs.
func (d *Difference) compare(ctx context.Context, t Tensor, a, b Source) error {
	bufA, bufB := make([]byte, min(chunkBytes, t.Bytes())), make([]byte, min(chunkBytes, t.Bytes()))
	for box := range t.chunks(t.Box(), chunkBytes) {
		if err := ctx.Err(); err != nil {
			return diag.New(diag.Canceled, "stopped while comparing %s", human.Quote(t.Name)).Wrap(err)
		}
		n := t.sized(box.Size)
		if err := a.ReadSlice(t.Name, box, bufA[:n]); err != nil {
			return err
		}
		if err := b.ReadSlice(t.Name, box, bufB[:n]); err != nil {
			return err
		}
		if !bytes.Equal(bufA[:n], bufB[:n]) {
			d.add(t.DType, bufA[:n], bufB[:n])
		}
	}
	return nil
}

// add counts the elements of a chunk that differ.
func (d *Difference) add(t dtype.DType, a, b []byte) {
	width := max(t.Bits()/8, 1)
	for i := 0; i+width <= len(a); i += width {
		if bytes.Equal(a[i:i+width], b[i:i+width]) {
			continue
		}
		d.Elements++
		x, y := t.Value(a[i:i+width]), t.Value(b[i:i+width])
		gap := math.Abs(x - y)
		if math.IsNaN(gap) || math.IsInf(gap, 0) {
			d.NoValue++
			continue
		}
		d.MaxAbs = max(d.MaxAbs, gap)
		if gap > 0 {
			d.MaxRel = max(d.MaxRel, gap/max(math.Abs(x), math.Abs(y)))
		}
	}
}
