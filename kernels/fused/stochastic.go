package fused

import tt "github.com/deepwell/deepwell/kernels/triton"

// A stochastic makes the random bits of stochastic rounding, as dtype/block does: 32 bits for each
// four elements that follow each other in a block, hashed from the tensor's key and the place of
// the first.
type stochastic struct {
	*tile
	seed, step, layer tt.Value
	rows, cols        tt.Value // the places of rows and columns in the whole
}

// A key is made of seed, step, layer and tensor.
type key struct{ a, b tt.Value }

// tensors is how many tensors of one layer may be rounded stochastically.
const tensors = 64

// newStochastic takes [seed, step, layer] and the places. The places of four elements that share
// bits follow each other.
func newStochastic(t *tile, noise, rows, cols tt.Value) *stochastic {
	word := func(i int) tt.Value { return t.b.Load(noise.At(t.b.Full(i, tt.I32))) }
	return &stochastic{t, word(0), word(1), word(2), rows, cols}
}

// key makes the key of a tensor.
func (c *stochastic) key(tensor int) key {
	a := mix(c.step.Xor(mix(c.layer.Mul(tensors).Add(tensor))))
	a = mix(c.seed.Xor(a))
	return key{a, mix(a.Xor(murmur1))}
}

// The factors of MurmurHash3's finalizer, with signs.
const (
	murmur1 = 0x85ebca6b - 1<<32
	murmur2 = 0xc2b2ae35 - 1<<32
)

// mix is MurmurHash3's finalizer.
func mix(h tt.Value) tt.Value {
	h = h.Xor(h.ShrU(16)).Mul(murmur1)
	h = h.Xor(h.ShrU(13)).Mul(murmur2)
	return h.Xor(h.ShrU(16))
}

// hash gives the bits of places, [len(row), len(col)].
func (k key) hash(row, col tt.Value) tt.Value {
	return mix(mix(row.Xor(k.a)).Expand(1).Xor(col.Xor(k.b).Expand(0)))
}

// load reads the places of some rows or columns, of which there are n; beyond them any number does.
func (c *stochastic) load(places, at, here tt.Value, n int) tt.Value {
	if c.masked {
		return c.b.LoadIf(here.Is("lt", n), places.At(at), 0)
	}
	return c.b.Load(places.At(at))
}

// along gives the bits of four columns each, [32, wide/4].
func (c *stochastic) along(k key) tt.Value {
	col := c.b.Program(1).Mul(c.wide).Add(c.b.Range(c.wide / 4).Mul(4))
	return k.hash(c.load(c.rows, c.globalRow(), c.row, c.tile.rows),
		c.load(c.cols, col, col, c.tile.cols))
}

// across gives the bits of four rows each, transposed: [wide, 8].
func (c *stochastic) across(k key) tt.Value {
	row := c.b.Program(0).Mul(tileRows).Add(c.b.Range(tileRows / 4).Mul(4))
	at := row
	if c.batch > 1 {
		at = row.Add(c.b.Program(2).Mul(c.tile.rows))
	}
	return k.hash(c.load(c.rows, at, row, c.tile.rows),
		c.load(c.cols, c.col, c.col, c.tile.cols)).Trans(1, 0)
}

// roundFour rounds four float32 numbers to E2M1 by 8 of 32 random bits each, the first into the
// lowest of 16 bits: by the GPU's conversion, whose bytes of random bits are the lower ones of both
// halves for the first two, or by adding them.
func roundFour(v [4]tt.Value, draw tt.Value, added bool) tt.Value {
	if !added {
		return v[0].PackFour("{ .reg .b16 t; cvt.rs.satfinite.e2m1x4.f32 t, {$4, $3, $2, $1}, $5; "+
			"mov.b32 $0, {t, t}; }", v[1], v[2], v[3], draw)
	}
	var word tt.Value
	for i, shift := range []int{0, 16, 8, 24} {
		random := draw
		if up := 14 - shift; up > 0 {
			random = draw.Shl(up)
		} else {
			random = draw.ShrU(-up)
		}
		code := addBits(v[i], random.And(0xff<<14))
		if word == nil {
			word = code
			continue
		}
		word = word.Or(code.Shl(4 * i))
	}
	return word
}

// addBits adds random bits, at the first 8 that E2M1 drops of a number from 1 on, to magnitudes,
// and truncates. Below 1 the steps of E2M1 are the steps of (1 + x)/2, in the binade
// below, which is the larger there; x is from 1 on.
func addBits(v, random tt.Value) tt.Value {
	x := v.Bits(tt.I32).And(1<<31 - 1).Bits(tt.F32)
	half := x.Asm("fma.rz.f32 $0, $1, 0f3F000000, 0f3F000000;", "=f,f")
	sum := x.Max(half).Min(6.0).Bits(tt.I32).Add(random).Sub(252 << 22)
	return sum.ShrU(22).Or(v.Bits(tt.I32).ShrU(28).And(8))
}
