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

// sized are tiles for heads of queries and values of up to a number of elements together.
type sized struct {
	upTo  int
	parts map[Part]tiles
}

// largeTiles and smallTiles were seen to compile without spills and within shared and tensor memory
// (kernels/fused/table.csv).
var (
	largeTiles = []sized{
		{320, map[Part]tiles{Forward: {128, 128, 8, 2}, DQ: {128, 64, 8, 2}, DKV: {64, 128, 8, 2}}},
		{512, map[Part]tiles{Forward: {128, 64, 8, 2}, DQ: {128, 32, 8, 2}, DKV: {32, 64, 8, 2}}},
	}
	smallTiles = []sized{
		{256, map[Part]tiles{Forward: {128, 64, 8, 2}, DQ: {64, 64, 8, 2}, DKV: {32, 64, 8, 2}}},
		{320, map[Part]tiles{Forward: {128, 32, 8, 2}, DQ: {64, 32, 8, 2}, DKV: {16, 64, 8, 2}}},
		{512, map[Part]tiles{Forward: {64, 32, 8, 1}, DQ: {64, 32, 8, 1}, DKV: {32, 32, 8, 1}}},
	}
)

// tiles are the first that the heads fit in; a head beyond 192 takes the last.
func (a Attention) tiles() tiles {
	list := largeTiles
	if a.Small {
		list = smallTiles
	}
	head, value := wide(chunks(a.Head)), wide(chunks(a.Value))
	for _, s := range list[:len(list)-1] {
		if head+value <= s.upTo && max(head, value) <= 192 {
			return s.parts[a.Part]
		}
	}
	return list[len(list)-1].parts[a.Part]
}

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
