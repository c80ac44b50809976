package aten

import (
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/ir"
)

// A dim is a dimension before it has a name: an index into a table.
type dim int

// A table has what was found out about dimensions. It outlives the readings of a program: a
// dimension is known by a key that is the same in each, such as a parameter and its axis.
type table struct {
	byKey    map[string]dim
	all      []entry
	together map[[2]dim]bool // the two are dimensions of one tensor
	changed  bool            // in this reading
	names    map[dim]string  // of roots, as the reading before found them
}

type entry struct {
	key   string
	size  int64
	same  dim   // the dimension that this one is, or itself
	parts []dim // major first, where it was split
	want  int   // rank among houseNames, or len(houseNames)
	from  dim   // whose name it has if it wants none, or -1
	param bool  // of a parameter
}

// houseNames are the names that mean something, those that win first.
var houseNames = []string{ir.Batch, ir.Vocab, ir.Seq, ir.Heads, ir.KVHeads, ir.HeadDim, ir.Keys,
	ir.ExpertDim, ir.RouterDim, ir.Choice, ir.EmbedDim, ir.MLPDim}

func newTable() *table {
	return &table{byKey: map[string]dim{}, together: map[[2]dim]bool{}, names: map[dim]string{}}
}

// dim gives the dimension of a key; from lends it a name, if it is not negative.
func (t *table) dim(key string, size int64, want string, from dim) dim {
	d, ok := t.byKey[key]
	if !ok {
		d = dim(len(t.all))
		t.byKey[key] = d
		t.all = append(t.all, entry{key: key, size: size, same: d, want: len(houseNames), from: from})
		t.changed = true
	}
	t.wish(d, want)
	return d
}

// wish gives a dimension a name unless it has a better one.
func (t *table) wish(d dim, name string) {
	d = t.root(d)
	if i := slices.Index(houseNames, name); i >= 0 && i < t.all[d].want {
		t.all[d].want, t.changed = i, true
	}
}

func (t *table) root(d dim) dim {
	for t.all[d].same != d {
		d = t.all[d].same
	}
	return d
}

// leaves gives the dimensions that a dimension was found to consist of.
func (t *table) leaves(d dim) []dim {
	d = t.root(d)
	if t.all[d].parts == nil {
		return []dim{d}
	}
	var list []dim
	for _, p := range t.all[d].parts {
		list = append(list, t.leaves(p)...)
	}
	return list
}

// split remembers that a dimension is a product.
func (t *table) split(d dim, minor int64) (dim, dim) {
	d = t.root(d)
	if p := t.all[d].parts; p != nil {
		if t.all[p[1]].size == minor {
			return t.root(p[0]), t.root(p[1])
		}
		// Split another way before: this way is this reading's alone.
		key := t.all[d].key + "/" + strconv.FormatInt(minor, 10)
		hi, lo := t.dim(key+"<", t.all[d].size/minor, "", -1), t.dim(key+">", minor, "", -1)
		return t.root(hi), t.root(lo)
	}
	key := t.all[d].key
	major := t.dim(key+"<", t.all[d].size/minor, "", -1)
	low := t.dim(key+">", minor, "", -1)
	t.all[d].parts, t.changed = []dim{major, low}, true
	// What stands with the whole stands with its parts: names are given before the next reading
	// meets them.
	var with []dim
	for i := range t.all {
		if t.together[[2]dim{d, dim(i)}] {
			with = append(with, dim(i))
		}
	}
	for _, o := range append(with, major) {
		for _, leaf := range t.leaves(o) {
			t.stand(low, leaf)
			if o != major {
				t.stand(major, leaf)
			}
		}
	}
	return major, low
}

// stand remembers that a tensor has two dimensions.
func (t *table) stand(a, b dim) {
	if a, b = t.root(a), t.root(b); a != b {
		t.together[[2]dim{a, b}], t.together[[2]dim{b, a}] = true, true
	}
}

// unite remembers that two dimensions are one, unless a tensor has both.
func (t *table) unite(a, b dim) {
	a, b = t.root(a), t.root(b)
	if a == b || t.together[[2]dim{a, b}] || t.all[a].parts != nil || t.all[b].parts != nil {
		return
	}
	if a > b {
		a, b = b, a
	}
	t.all[b].same, t.changed = a, true
	t.all[a].param = t.all[a].param || t.all[b].param
	t.all[a].want = min(t.all[a].want, t.all[b].want)
	for pair := range t.together {
		if pair[0] == b {
			t.together[[2]dim{a, pair[1]}], t.together[[2]dim{pair[1], a}] = true, true
		}
	}
}

// meet remembers that a tensor has dimensions.
func (t *table) meet(list []dim) {
	for i, a := range list {
		for _, b := range list[:i] {
			a, b := t.root(a), t.root(b)
			t.together[[2]dim{a, b}], t.together[[2]dim{b, a}] = true, true
		}
	}
}

// name is the name of a dimension in this reading.
func (t *table) name(d dim) string {
	if n := t.names[d]; n != "" {
		return n
	}
	return "d" + strconv.Itoa(int(d))
}

// wanted is the name that a dimension wants, or its source's.
func (t *table) wanted(d dim) string {
	for range t.all { // sources may have become one with what has its name from them
		d = t.root(d)
		e := t.all[d]
		if e.want < len(houseNames) {
			return houseNames[e.want]
		}
		if e.from < 0 {
			break
		}
		d = e.from
	}
	return ""
}

// rename gives names to all roots, and reports whether any changed. Two may have one name if no
// tensor has both.
func (t *table) rename() bool {
	names, numbers := map[dim]string{}, map[string]int{}
	have := map[string][]dim{}
	for i := range t.all {
		d := dim(i)
		if t.root(d) != d {
			continue
		}
		taken := func(name string) bool {
			return name == "" || slices.ContainsFunc(have[name], func(o dim) bool {
				return t.together[[2]dim{o, d}]
			})
		}
		name := t.wanted(d)
		if taken(name) { // layers give a dimension without a name the same number
			at, rest := placeOf(t.all[d].key)
			own := at.list + "." + strconv.Itoa(at.n) + "." // keys may hold keys
			kind := at.list + "." + strings.ReplaceAll(rest, own, at.list+".")
			if _, ok := numbers[kind]; !ok {
				numbers[kind] = len(numbers)
			}
			name = "dim" + strconv.Itoa(numbers[kind])
		}
		if taken(name) {
			name = "d" + strconv.Itoa(i)
		}
		names[d] = name
		have[name] = append(have[name], d)
	}
	same := len(names) == len(t.names)
	for d, n := range names {
		same = same && t.names[d] == n
	}
	t.names = names
	return !same
}
