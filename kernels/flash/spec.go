package flash

import (
	"fmt"
	"strconv"
	"strings"
)

// MaxHead is the largest head: with more, sums leave registers.
const MaxHead = 256

// tiles are the blocks of queries and keys that one program has at a time, its warps, and the
// stages of its loop.
type tiles struct{ queries, keys, warps, stages int }

// sized are tiles for heads of queries and of values of up to a number of elements, in chunks.
type sized struct {
	head, value int
	parts       map[Part]tiles
}

// largeTiles and smallTiles were seen to compile within registers, shared and tensor memory
// (kernels/fused/table.csv): small ones of each way to take heads apart, with and without a cap, a
// window, documents and a last block that lies partly outside.
var (
	most       = map[Part]tiles{Forward: {128, 128, 8, 2}, DQ: {128, 64, 8, 2}, DKV: {64, 128, 8, 2}}
	largeTiles = []sized{
		{32, 32, map[Part]tiles{Forward: {128, 64, 8, 2}, DQ: {128, 32, 8, 2}, DKV: {64, 128, 8, 2}}},
		{80, 80, map[Part]tiles{Forward: {128, 128, 8, 2}, DQ: {128, 32, 8, 2}, DKV: {64, 128, 8, 2}}},
		{96, 96, map[Part]tiles{Forward: {128, 64, 8, 2}, DQ: {128, 64, 8, 2}, DKV: {64, 128, 8, 2}}},
		{160, 160, most},
		{192, 128, map[Part]tiles{Forward: {128, 128, 8, 2}, DQ: {64, 64, 8, 2}, DKV: {64, 128, 8, 2}}},
		{128, 192, most},
		{MaxHead, MaxHead,
			map[Part]tiles{Forward: {128, 64, 8, 2}, DQ: {128, 32, 8, 2}, DKV: {32, 64, 8, 2}}},
	}
	smallTiles = []sized{
		{64, 64, map[Part]tiles{Forward: {128, 64, 8, 2}, DQ: {64, 32, 8, 2}, DKV: {32, 64, 8, 2}}},
		{96, 96, map[Part]tiles{Forward: {128, 32, 8, 2}, DQ: {64, 32, 8, 2}, DKV: {32, 64, 8, 2}}},
		{128, 64, map[Part]tiles{Forward: {128, 32, 8, 2}, DQ: {64, 32, 8, 2}, DKV: {16, 64, 8, 2}}},
		{128, 96, map[Part]tiles{Forward: {128, 32, 8, 2}, DQ: {64, 32, 8, 2}, DKV: {16, 32, 8, 2}}},
		{128, 128, map[Part]tiles{Forward: {128, 32, 8, 2}, DQ: {64, 32, 8, 2}, DKV: {32, 64, 8, 2}}},
		{160, 160, map[Part]tiles{Forward: {128, 32, 8, 2}, DQ: {64, 16, 8, 2}, DKV: {16, 32, 8, 2}}},
		{192, 128, map[Part]tiles{Forward: {64, 32, 8, 2}, DQ: {32, 64, 8, 2}, DKV: {32, 32, 8, 2}}},
		{192, 192, map[Part]tiles{Forward: {32, 32, 8, 2}, DQ: {32, 64, 8, 2}, DKV: {32, 32, 8, 2}}},
		{MaxHead, MaxHead,
			map[Part]tiles{Forward: {64, 32, 8, 1}, DQ: {64, 32, 8, 1}, DKV: {32, 32, 8, 1}}},
	}
)

// tiles are the first that the heads fit in.
func (a Attention) tiles() tiles {
	list := largeTiles
	if a.Small {
		list = smallTiles
	}
	last := list[len(list)-1]
	head, value := wide(a.chunks(a.Head)), wide(a.chunks(a.Value))
	if a.Small && a.odd() && max(head, value) > 64 {
		return last.parts[a.Part]
	}
	for _, s := range list {
		if head <= s.head && value <= s.value {
			return s.parts[a.Part]
		}
	}
	return last.parts[a.Part]
}

// odd tells heads whose elements are not read in whole vectors of 16 bytes, which takes registers.
func (a Attention) odd() bool { return a.Head%8 != 0 || a.Value%8 != 0 }

// String specifies the kernel in its call, for whoever reads the program:
//
//	attention dq 2x4096x4096 heads=16/8 sizes=256/256 scale=0.0625 softcap=50 window=4096 causal
func (a Attention) String() string {
	words := []string{"attention", string(a.Part), fmt.Sprintf("%dx%dx%d", a.Batch, a.Seq, a.Keys),
		fmt.Sprintf("heads=%d/%d", a.Heads, a.KVHeads), fmt.Sprintf("sizes=%d/%d", a.Head, a.Value),
		"scale=" + number(a.Scale), "softcap=" + number(a.SoftCap), fmt.Sprintf("window=%d", a.Window)}
	for _, f := range a.flags() {
		if *f.is {
			words = append(words, f.name)
		}
	}
	return strings.Join(words, " ")
}

func number(f float64) string { return strconv.FormatFloat(f, 'g', -1, 64) }

// flags are the words of an attention that is not a plain one.
func (a *Attention) flags() []struct {
	name string
	is   *bool
} {
	return []struct {
		name string
		is   *bool
	}{{"causal", &a.Causal}, {"documents", &a.Documents}, {"small", &a.Small}}
}

// Is tells whether a specification is of an attention.
func Is(text string) bool { return strings.HasPrefix(text, "attention ") }

// Parse reads what String prints.
func Parse(text string) (a Attention, err error) {
	words := strings.Split(text, " ")
	bad := fmt.Errorf("no attention is specified by %q", text)
	if len(words) < 8 || words[0] != "attention" {
		return a, bad
	}
	a.Part = Part(words[1])
	_, err = fmt.Sscanf(strings.Join(words[2:8], " "),
		"%dx%dx%d heads=%d/%d sizes=%d/%d scale=%g softcap=%g window=%d", &a.Batch, &a.Seq, &a.Keys,
		&a.Heads, &a.KVHeads, &a.Head, &a.Value, &a.Scale, &a.SoftCap, &a.Window)
	if err != nil {
		return a, bad
	}
	for _, word := range words[8:] {
		known := false
		for _, f := range a.flags() {
			if f.name == word {
				*f.is, known = true, true
			}
		}
		if !known {
			return a, bad
		}
	}
	if err := a.Check(); err != nil {
		return a, err
	}
	if a.String() != text {
		return a, bad
	}
	return a, nil
}

// Key names the kernels whatever their sizes are: what a GPU refuses of one it refuses of all, and
// a forward pass needs its gradient.
func (a Attention) Key() string {
	if a.SoftCap > 0 {
		return "attention softcap"
	}
	return "attention"
}
