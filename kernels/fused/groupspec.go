package fused

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/dtype"
)

// String specifies the product in the call of its kernel, for whoever reads the program:
//
//	grouped mxfp8 24576x14336x4096 experts=8 filled=16896 weights=keo
//	grouped nvfp4 24576x14336x4096 experts=8 filled=17408 weights=eok shards=8
func (g Group) String() string {
	words := []string{"grouped", cmp.Or(string(g.Format), "bf16"),
		fmt.Sprintf("%dx%dx%d", g.Rows, g.Out, g.In), fmt.Sprintf("experts=%d", g.Experts),
		fmt.Sprintf("filled=%d", g.Filled), "weights=" + g.order()}
	for word, is := range g.flags() {
		if *is {
			words = append(words, word)
		}
	}
	if g.Shards > 0 {
		words = append(words, fmt.Sprintf("shards=%d", g.Shards))
	}
	slices.Sort(words[6:])
	return strings.Join(words, " ")
}

// flags are the words of a grouped product that is not a plain one.
func (g *Group) flags() map[string]*bool {
	return map[string]*bool{"grad": &g.Grad, "wide": &g.Wide, "small": &g.Small}
}

// IsGroup tells whether a specification is of a grouped product.
func IsGroup(text string) bool { return strings.HasPrefix(text, "grouped ") }

// ParseGroup reads what String prints.
func ParseGroup(text string) (g Group, err error) {
	words := strings.Split(text, " ")
	bad := fmt.Errorf("no grouped product is specified by %q", text)
	if len(words) < 6 || words[0] != "grouped" {
		return g, bad
	}
	if g.Format = dtype.Format(words[1]); words[1] == "bf16" {
		g.Format = ""
	}
	rest := strings.Join(words[2:6], " ")
	_, err = fmt.Sscanf(rest, "%dx%dx%d experts=%d filled=%d weights=%s", &g.Rows, &g.Out, &g.In,
		&g.Experts, &g.Filled, &g.Weights)
	if err != nil {
		return g, bad
	}
	for _, word := range words[6:] {
		if n, ok := strings.CutPrefix(word, "shards="); ok {
			if g.Shards, err = strconv.Atoi(n); err != nil {
				return g, bad
			}
			continue
		}
		is := g.flags()[word]
		if is == nil {
			return g, bad
		}
		*is = true
	}
	if err := g.check(); err != nil {
		return g, err
	}
	if g.String() != text {
		return g, bad
	}
	return g, nil
}

// Key names the kernel whatever its sizes are, as [Spec.Key] does.
func (g Group) Key() string {
	key := "grouped " + cmp.Or(string(g.Format), "bf16")
	if g.Grad {
		key += " grad"
	}
	return key
}

// FLOPs is what the product computes of the rows that are expected.
func (g Group) FLOPs() int64 { return 2 * int64(g.Filled) * int64(g.Out) * int64(g.In) }

// Bytes is what the kernel reads and writes, each once: expected rows, all weights, and a whole
// result.
func (g Group) Bytes() int64 {
	size := func(n int64) int64 {
		if g.Format == "" {
			return 2 * n
		}
		return g.Format.Codes().Bytes(n) + g.Format.Scales().Bytes(n/g.Format.Block())
	}
	filled, weights := int64(g.Filled), int64(g.Experts)*int64(g.Out)*int64(g.In)
	if !g.Grad {
		return size(filled*int64(g.In)) + size(weights) + 2*int64(g.Rows)*int64(g.Out)
	}
	wide := int64(2)
	if g.Wide {
		wide = 4
	}
	return size(filled*int64(g.In)) + size(filled*int64(g.Out)) + wide*weights
}

// Bits is the size of an operand's elements.
func (g Group) Bits() int {
	if g.Format == "" {
		return 16
	}
	return g.Format.Codes().Bits()
}

// Share is the kernel's FLOP rate over a library's, by a model: a tile in one multiprocessor loads
// 96 bytes a clock at full rate, of which L2 is assumed to give 64, and nothing hides the first
// loads and the way out, which take as long as 892 numbers of the sum; libraries reach 72.5 % of
// peak (reference/moe_lowering.md 6: 60 % of peak at sums of 7,168, 47 % at 2,048). In NVFP4 the
// way out takes as long as 1,024 numbers (52.5 % at 7,168, 40 % at 2,048).
func (g Group) Share() float64 {
	sum := float64(g.In)
	if g.Grad {
		sum = float64(g.Filled) / float64(max(g.Experts, 1))
	}
	most, ends := 0.675, 892.0
	if g.Format == dtype.NVFP4 {
		most, ends = 0.6, 1024
	}
	return most / 0.725 * sum / (sum + ends)
}
