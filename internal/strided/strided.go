package strided

import (
	"cmp"
	"runtime"
	"slices"
	"sync"

	"github.com/deepwell/deepwell/internal/lists"
)

// An Axis is one dimension of a box: its length, and the strides of the source and of the
// destination along it, in elements.
type Axis struct{ N, Src, Dst int64 }

// Copy moves the elements of a box; each has width bytes. src and dst begin at the first of them.
// No two elements of the destination may be the same.
func Copy(dst, src []byte, width int64, axes []Axis) {
	axes = merged(axes)
	if slices.ContainsFunc(axes, func(a Axis) bool { return a.N <= 0 }) {
		return
	}
	c := copier{width: width}
	c.innermost(axes)
	c.split(dst, src)
}

// Swap gives the copy back: what was the source is the destination.
func Swap(axes []Axis) []Axis {
	return lists.Map(axes, func(a Axis) Axis { return Axis{N: a.N, Src: a.Dst, Dst: a.Src} })
}

// Each visits the places of the elements of a box, in elements.
func Each(axes []Axis, visit func(src, dst int64)) {
	if len(axes) == 0 {
		visit(0, 0)
		return
	}
	for i := range axes[0].N {
		Each(axes[1:], func(src, dst int64) { visit(src+i*axes[0].Src, dst+i*axes[0].Dst) })
	}
}

// merged drops dimensions of one element, brings the rest into the destination's order, and joins
// neighbors that are one dimension in both arrays.
func merged(axes []Axis) []Axis {
	axes = slices.DeleteFunc(slices.Clone(axes), func(a Axis) bool { return a.N == 1 })
	lists.Sort(axes, func(a, b Axis) int { return cmp.Compare(b.Dst, a.Dst) })
	var list []Axis
	for _, a := range axes {
		if n := len(list); n > 0 && list[n-1].Src == a.N*a.Src && list[n-1].Dst == a.N*a.Dst {
			a.N *= list[n-1].N
			list = list[:n-1]
		}
		list = append(list, a)
	}
	return list
}

// A copier has the dimensions of a copy: the innermost are moved by one loop, and outer are walked.
type copier struct {
	width int64
	outer []Axis
	run   int64 // bytes that are next to each other in both arrays, if cols is zero
	// rows are next to each other in the destination, cols in the source: a transposition.
	rows, cols Axis
}

func (c *copier) innermost(axes []Axis) {
	c.outer, c.run = axes, c.width
	n := len(axes)
	if n == 0 {
		return
	}
	last := axes[n-1]
	if last.Src == 1 && last.Dst == 1 {
		c.outer, c.run = axes[:n-1], last.N*c.width
		return
	}
	at := slices.IndexFunc(axes, func(a Axis) bool { return a.Src == 1 })
	if last.Dst == 1 && at >= 0 && c.transposes() {
		c.rows, c.cols = last, axes[at]
		c.outer = slices.Delete(slices.Clone(axes[:n-1]), at, at+1)
	}
}

// shareBytes is what is worth a goroutine of its own.
const shareBytes = 1 << 20

// split deals a large copy to all processors, along its longest outer dimension or along the
// columns of a transposition.
func (c *copier) split(dst, src []byte) {
	bytes := max(c.run, c.width*c.rows.N*c.cols.N)
	longest := -1
	for i, a := range c.outer {
		bytes *= a.N
		if longest < 0 || a.N > c.outer[longest].N {
			longest = i
		}
	}
	shares := min(int64(runtime.GOMAXPROCS(0)), bytes/shareBytes)
	along := &c.cols
	if longest >= 0 {
		along = &c.outer[longest]
	}
	if shares = min(shares, along.N); shares <= 1 {
		c.walk(dst, src, c.outer)
		return
	}
	var wait sync.WaitGroup
	for i := range shares {
		from, to := along.N*i/shares, along.N*(i+1)/shares
		one := *c
		one.outer = slices.Clone(c.outer)
		if longest >= 0 {
			one.outer[longest].N = to - from
		} else {
			one.cols.N = to - from
		}
		d, s := dst[from*along.Dst*c.width:], src[from*along.Src*c.width:]
		wait.Go(func() { one.walk(d, s, one.outer) })
	}
	wait.Wait()
}

func (c *copier) walk(dst, src []byte, outer []Axis) {
	if len(outer) == 0 {
		if c.cols.N == 0 {
			copy(dst[:c.run], src)
			return
		}
		c.transpose(dst, src)
		return
	}
	a := outer[0]
	if len(outer) == 1 && c.cols.N == 0 { // runs one after another: most of the time is spent here
		for i := range a.N {
			at := i * a.Src * c.width
			copy(dst[i*a.Dst*c.width:][:c.run], src[at:at+c.run])
		}
		return
	}
	for i := range a.N {
		c.walk(dst[i*a.Dst*c.width:], src[i*a.Src*c.width:], outer[1:])
	}
}
