package ir

// Layer is the name of the dimension along which a repeat stacks.
const Layer = "layer"

// A Loop is a typed view of a repeat: its body runs N times. The arguments of a repeat, and the
// inputs of its body, come in three parts: carries, stacks, invariants; the body's results are the
// next carries, then values that are stacked round by round.
type Loop struct {
	*Op
	N       int64 // rounds
	First   int64 // the model's layer at index 0 of the stacks
	Reverse bool  // slices are taken, and laid down, from the last to the first

	Carries    []*Value // what each round takes from the one before
	Stacks     []*Value // [Layer, ...], of which each round gets its own slice
	Invariants []*Value // what every round sees
}

// Loop views a repeat.
func (op *Op) Loop() Loop {
	a := op.Attrs
	c, s := a.Int("carries"), a.Int("carries")+a.Int("stacked")
	return Loop{Op: op, N: a.Int("n"), First: a.Int("first"), Reverse: a.Bool("reverse"),
		Carries: op.In[:c:c], Stacks: op.In[c:s:s], Invariants: op.In[s:]}
}

// IsCarry tells whether an argument, by its place, is a carry.
func (l Loop) IsCarry(i int) bool { return i < len(l.Carries) }

// IsStack tells whether an argument, by its place, is a stack.
func (l Loop) IsStack(i int) bool { return !l.IsCarry(i) && i < len(l.Carries)+len(l.Stacks) }

// StackIndex is the index along the stacks, from 0, of the slices that a round takes. The layer of
// the model is First + StackIndex.
func (l Loop) StackIndex(round int64) int64 {
	if l.Reverse {
		return l.N - 1 - round
	}
	return round
}

// Stacked is the type of n values of a type, one for each round of a loop.
func (t Type) Stacked(n int64) Type {
	return Type{t.Elem, append([]Dim{{Layer, n}}, t.Dims...), t.Place}
}

// Slice is the type of what one round gets of a stack; of a type without dimensions, as a dead
// value has, it is the type itself.
func (t Type) Slice() Type {
	if len(t.Dims) == 0 {
		return t
	}
	return Type{t.Elem, t.Dims[1:], t.Place}
}

// loopAttrs are the attributes of a repeat with numbers of carries and stacks.
func loopAttrs(a Attrs, carries, stacks int) Attrs {
	return a.With("carries", carries).With("stacked", stacks)
}

// gives adds a result to an operation that no builder makes.
func (op *Op) gives(name string, t Type) *Value {
	v := &Value{Name: name, Type: t, def: op}
	op.Out = append(op.Out, v)
	return v
}
