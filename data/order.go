package data

import (
	"crypto/sha256"
	"encoding/binary"
	"math"
	"math/bits"

	"github.com/deepwell/deepwell/diag"
)

// rounds of the Feistel network. Four make a pseudorandom permutation if the halves are wide (Luby
// and Rackoff 1988); a small source has halves of few bits, so there are twice as many.
const rounds = 8

// A permutation puts the numbers below n into an order that depends on a key, without memory: a
// Feistel network permutes the next power of four, and numbers that fall outside walk on along
// their cycle until they are inside.
type permutation struct {
	n    uint64
	half uint
	keys [rounds]uint64
}

// newPermutation gives the order of the rows of a source in an epoch.
func newPermutation(n int64, seed uint64, epoch int64, source string) *permutation {
	p := &permutation{n: uint64(n), half: uint(bits.Len64(uint64(n-1))+1) / 2}
	var in []byte
	in = append(in, "deepwell order 1\n"...)
	in = binary.LittleEndian.AppendUint64(in, seed)
	in = binary.LittleEndian.AppendUint64(in, uint64(epoch))
	sum := sha256.Sum256(append(in, source...))
	for i := range p.keys {
		word := binary.LittleEndian.Uint64(sum[i%4*8:])
		p.keys[i] = mix(word + uint64(i/4))
	}
	return p
}

// at gives the number that stands at place i.
func (p *permutation) at(i int64) int64 {
	x := uint64(i)
	for {
		if x = p.step(x); x < p.n {
			return int64(x)
		}
	}
}

func (p *permutation) step(x uint64) uint64 {
	mask := uint64(1)<<p.half - 1
	left, right := x>>p.half, x&mask
	for _, key := range p.keys {
		left, right = right, left^mix(right+key)&mask
	}
	return left<<p.half | right
}

// mix spreads the bits of x: the finalizer of MurmurHash3, with the constants that David Stafford
// found best ("Mix13", 2011).
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// whole is the sum of the shares of a mixture. Products of a share and a number of rows stay
// within 63 bits for maxRows.
const (
	whole   = 1 << 24
	maxRows = 1 << 38
)

// newShares makes integers of weights, so that no rounding depends on the machine. Every source
// has at least the smallest share.
func newShares(weights []float64) ([]int64, error) {
	sum := 0.0
	for _, w := range weights {
		if !(w > 0) || math.IsInf(w, 0) {
			return nil, diag.New(diag.BadInput, "%v is not a weight", w).
				Try("give every source a weight above 0, or none of them one")
		}
		sum += w
	}
	if math.IsInf(sum, 0) || len(weights) > whole/2 {
		return nil, diag.New(diag.BadInput, "the weights of the sources are too large")
	}
	shares := make([]int64, len(weights))
	left, largest := int64(whole), 0
	for i, w := range weights {
		shares[i] = max(1, int64(math.Round(w/sum*whole)))
		left -= shares[i]
		if shares[i] > shares[largest] {
			largest = i
		}
	}
	if shares[largest] += left; shares[largest] < 1 {
		return nil, diag.New(diag.BadInput, "the weights of the sources are too far apart")
	}
	return shares, nil
}

// next chooses the source of the row that follows when taken[i] rows were taken from source i, and
// total from all.
//
// The k-th row of a source of share s may be taken once k·whole < s·(total+1), and must be taken
// before row ⌈(k+1)·whole/s⌉ of all: then the source is never a whole row ahead of its share nor a
// whole row behind it. Of the sources that may be taken, the one with the nearest deadline is,
// which meets all deadlines that can be met (Baruah and others 1996, proportionate progress); a tie
// goes to the first.
func next(shares, taken []int64, total int64) int {
	best, nearest := 0, int64(math.MaxInt64)
	for i, s := range shares {
		if taken[i]*whole >= s*(total+1) {
			continue
		}
		if deadline := ((taken[i]+1)*whole + s - 1) / s; deadline < nearest {
			best, nearest = i, deadline
		}
	}
	return best
}
