package aten

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
)

// maxTurn is how many layers may differ in turn, as local and global attention do.
const maxTurn = 6

// A place is where a node stands in a list of modules: h.3.attn is place 3 of h.
type place struct {
	list string // "" outside of lists
	n    int
}

// placeOf finds the outermost list of a path, and the rest of the path.
func placeOf(path string) (p place, rest string) {
	words := strings.Split(path, ".")
	for i, w := range words {
		if n, err := strconv.Atoi(w); err == nil && i > 0 && n >= 0 {
			return place{strings.Join(words[:i], "."), n}, strings.Join(words[i+1:], ".")
		}
	}
	return place{}, path
}

// A mark says that the operations up to a value belong to a place.
type mark struct {
	v           *ir.Value
	at          place
	path, class string // of the innermost module
}

// A chunk is the operations of one layer, or of one turn of layers that differ.
type chunk struct {
	ops     []*ir.Op
	at      place
	text    string      // equal for chunks that compute the same
	outside []*ir.Value // what it reads, in the order of first use
	params  []*ir.Value // of its layers, likewise
	where   map[*ir.Value]int
	made    []*ir.Value
}

// A stack is a parameter of a loop: the tensors of every step-th layer from first on.
type stack struct {
	source      string // with {} for the number of the layer
	first, step int64
}

// A run is chunks that become one loop.
type run struct {
	chunks []*chunk
	carry  []int // by outside value: the place of what the chunk before made, or -1 for an invariant
	loads  []int // the places of what every chunk gives beside what it carries
	turn   int64
}

// looped gives the graph with repeated layers as loops.
func (m *maker) looped(g *ir.Graph) (*ir.Graph, error) {
	layers, users := m.layers(g), map[*ir.Value][]*ir.Op{}
	for _, op := range g.Ops {
		for _, v := range op.In {
			users[v] = append(users[v], op)
		}
	}
	begins := map[*ir.Op]*run{}
	for i := 0; i < len(layers); {
		r := m.longest(layers[i:], users, g.Results)
		if r == nil {
			i++
			continue
		}
		begins[r.chunks[0].ops[0]] = r
		i += len(r.chunks) * int(r.turn)
	}
	if len(begins) == 0 && len(m.loads) == 0 {
		return g, nil
	}
	return m.rewritten(g, begins)
}

// layers lists the places of lists in order, each with its operations.
func (m *maker) layers(g *ir.Graph) []*chunk {
	index := map[*ir.Value]int{}
	for i, op := range g.Ops {
		for _, v := range op.Out {
			index[v] = i
		}
	}
	var list []*chunk
	next := 0
	for _, k := range m.marks {
		i, ok := index[k.v]
		if !ok || i < next {
			continue
		}
		ops := g.Ops[next : i+1]
		next = i + 1
		if n := len(list); n > 0 && list[n-1].at == k.at {
			list[n-1].ops = append(list[n-1].ops, ops...)
		} else {
			list = append(list, &chunk{at: k.at, ops: slices.Clone(ops)})
		}
	}
	return list
}

// longest finds the run of equal chunks that begins a list of layers, with the shortest turn.
func (m *maker) longest(layers []*chunk, users map[*ir.Value][]*ir.Op, results []*ir.Value) *run {
	for turn := 1; turn <= maxTurn && 2*turn <= len(layers); turn++ {
		r := &run{turn: int64(turn)}
		for at := 0; at+turn <= len(layers); at += turn {
			c := joinedChunk(layers[at:at+turn], layers[0].at, at)
			if c == nil || len(r.chunks) > 0 && c.text != r.chunks[0].text {
				break
			}
			r.chunks = append(r.chunks, c)
		}
		for len(r.chunks) >= 2 && !r.fits(users, results, m.loads) {
			r.chunks = r.chunks[:len(r.chunks)-1]
		}
		if len(r.chunks) >= 2 {
			return r
		}
	}
	return nil
}

// joinedChunk reads some layers that follow each other as one; nil if they do not. They begin at
// place first.n+at of a list.
func joinedChunk(layers []*chunk, first place, at int) *chunk {
	c := &chunk{at: place{first.list, first.n + at}, where: map[*ir.Value]int{}}
	for i, l := range layers {
		if l.at.list == "" || l.at != (place{first.list, first.n + at + i}) {
			return nil
		}
		c.ops = append(c.ops, l.ops...)
	}
	var text strings.Builder
	for _, op := range c.ops {
		fmt.Fprint(&text, op.Kind, op.Attrs, op.Tag)
		for _, v := range op.In {
			fmt.Fprint(&text, " ", c.read(v, len(layers)), v.Type)
		}
		for _, v := range op.Out {
			c.where[v] = len(c.made)
			c.made = append(c.made, v)
		}
		text.WriteByte('\n')
	}
	c.text = text.String()
	return c
}

// read says what a value is to a chunk.
func (c *chunk) read(v *ir.Value, turn int) string {
	if i, ok := c.where[v]; ok {
		return fmt.Sprint("made ", i)
	}
	if p, rest := placeOf(v.Source); v.Role == ir.Param && p.list == c.at.list && p.n >= c.at.n &&
		p.n < c.at.n+turn {
		if !slices.Contains(c.params, v) {
			c.params = append(c.params, v)
		}
		return fmt.Sprint("param ", p.n-c.at.n, rest)
	}
	i := slices.Index(c.outside, v)
	if i < 0 {
		i = len(c.outside)
		c.outside = append(c.outside, v)
	}
	return fmt.Sprint("outside ", i)
}

// fits finds what the chunks carry, and reports whether they read and are read as rounds of a loop.
func (r *run) fits(users map[*ir.Value][]*ir.Op, results []*ir.Value, loads []expertLoad) bool {
	r.carry, r.loads = nil, nil
	for j, v := range r.chunks[0].outside {
		at := -1
		for k, c := range r.chunks[1:] {
			place, made := r.chunks[k].where[c.outside[j]]
			switch {
			case !made && c.outside[j] == v && at < 0:
			case made && (k == 0 || at == place) && c.outside[j].Type.Equal(v.Type):
				at = place
			default:
				return false
			}
		}
		r.carry = append(r.carry, at)
	}
	for k, c := range r.chunks {
		for _, v := range c.made {
			last := k == len(r.chunks)-1
			escapes := slices.Contains(results, v) && !isLoad(loads, v)
			for _, op := range users[v] {
				inside := slices.Contains(c.ops, op)
				next := !last && slices.Contains(r.chunks[k+1].ops, op)
				escapes = escapes || !inside && !next
			}
			if escapes && (!last || !slices.Contains(r.carry, c.where[v])) {
				return false
			}
		}
	}
	for k, c := range r.chunks {
		var places []int
		for _, v := range results {
			if at, ok := c.where[v]; ok && isLoad(loads, v) {
				places = append(places, at)
			}
		}
		if k > 0 && !slices.Equal(places, r.loads) {
			return false
		}
		r.loads = places
	}
	return slices.ContainsFunc(r.carry, func(at int) bool { return at >= 0 })
}

// stacked is the name and the source of the stack of a parameter.
func (r *run) stacked(v *ir.Value) (string, stack) {
	p, rest := placeOf(v.Source)
	first := r.chunks[0].at.n
	name := p.list + "." + rest
	if r.turn > 1 || first > 0 {
		name = fmt.Sprintf("%s.from%d.%s", p.list, p.n, rest)
	}
	// Policies know a linear layer by the last word of its name.
	return graphName(strings.TrimSuffix(name, ".weight")),
		stack{p.list + ".{}." + rest, int64(p.n), r.turn}
}

// rewritten copies a graph with loops in place of runs.
func (m *maker) rewritten(g *ir.Graph, begins map[*ir.Op]*run) (*ir.Graph, error) {
	b, to := ir.NewBuilder(g.Name), map[*ir.Value]*ir.Value{}
	heads, inside := map[*ir.Value]*run{}, map[*ir.Value]bool{}
	skip := map[*ir.Op]bool{}
	for _, r := range begins {
		for k, c := range r.chunks {
			for _, v := range c.params {
				if inside[v] = true; k == 0 {
					heads[v] = r
				}
			}
			for _, op := range c.ops {
				skip[op] = true
			}
		}
	}
	for _, v := range g.Inputs {
		switch r := heads[v]; {
		case r != nil:
			name, s := r.stacked(v)
			t := v.Type
			t.Dims = append([]ir.Dim{{Name: ir.Layer, Size: int64(len(r.chunks))}}, t.Dims...)
			to[v] = b.Input(name, ir.Param, t, s.source)
			m.stacks[name] = s
		case !inside[v]:
			to[v] = b.InputLike(v, v.Type)
		}
	}
	for _, op := range g.Ops {
		if r := begins[op]; r != nil {
			if err := m.loop(b, r, to); err != nil {
				return nil, err
			}
		}
		if skip[op] {
			continue
		}
		for i, v := range b.CopyWith(op, op.Attrs, op.Body, mapped(op.In, to)...) {
			to[op.Out[i]] = v
		}
	}
	var results []*ir.Value
	for _, v := range g.Results {
		switch now := to[v]; {
		case now == nil: // of a load that a loop gives with others
		case isLoad(m.loads, v) && now.Type.Index(ir.Layer) < 0:
			now = b.Broadcast(now, 0, ir.Dim{Name: ir.Layer, Size: 1})
			results = append(results, model.AsLoad(now, m.routerOf(v)))
		default:
			results = append(results, now)
		}
	}
	return b.Graph(results...)
}

// isLoad reports whether a value is what experts had to do.
func isLoad(list []expertLoad, v *ir.Value) bool {
	return slices.ContainsFunc(list, func(l expertLoad) bool { return l.v == v })
}

// routerOf is the weight of the router whose choices a load counts.
func (m *maker) routerOf(v *ir.Value) string {
	i := slices.IndexFunc(m.loads, func(l expertLoad) bool { return l.v == v })
	return m.loads[i].router
}

func mapped(list []*ir.Value, to map[*ir.Value]*ir.Value) []*ir.Value {
	out := make([]*ir.Value, len(list))
	for i, v := range list {
		out[i] = to[v]
	}
	return out
}

// loop writes a run as one loop, whose body is the first chunk.
func (m *maker) loop(b *ir.Builder, r *run, to map[*ir.Value]*ir.Value) error {
	c := r.chunks[0]
	body, in := ir.NewBuilder("layers"), map[*ir.Value]*ir.Value{}
	var carries, rest, ends []*ir.Value
	for j, v := range c.outside {
		if r.carry[j] >= 0 {
			in[v] = body.Input(fmt.Sprint("x", len(carries)), ir.Data, v.Type, "")
			carries = append(carries, to[v])
			ends = append(ends, c.made[r.carry[j]])
		}
	}
	for _, v := range c.params {
		name, s := r.stacked(v)
		in[v] = body.Input(name, ir.Param, v.Type, s.source)
	}
	for j, v := range c.outside {
		if r.carry[j] < 0 {
			in[v] = body.Input(fmt.Sprint("same", len(rest)), ir.Data, v.Type, "")
			rest = append(rest, to[v])
		}
	}
	for _, op := range c.ops {
		for i, v := range body.CopyWith(op, op.Attrs, nil, mapped(op.In, in)...) {
			in[op.Out[i]] = v
		}
	}
	for _, at := range r.loads {
		ends = append(ends, c.made[at])
	}
	g, err := body.Graph(mapped(ends, in)...)
	if err != nil {
		return err
	}
	out := b.Repeat(int64(len(r.chunks)), g, carries, mapped(c.params, to), rest)
	last, k := r.chunks[len(r.chunks)-1], 0
	for _, at := range r.carry {
		if at >= 0 {
			to[last.made[at]] = out[k]
			k++
		}
	}
	for i, at := range r.loads {
		v := c.made[at]
		name := m.routerOf(v)
		for _, p := range c.params {
			if p.Name == name {
				name, _ = r.stacked(p)
			}
		}
		to[v] = model.AsLoad(out[k+i], name)
	}
	return b.Err()
}
