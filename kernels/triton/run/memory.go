package run

import "fmt"

// An array is the memory of one argument.
type array struct {
	name   string
	elem   string
	data   []byte
	result bool
	kept   bool // it has an operand's memory, and keeps what is not written
	// writer is the program that wrote an element, counted from 1; of results only.
	writer []int32
	// reader is the program that read an element of an operand's memory before anyone wrote it.
	reader map[int64]int32
}

// A descriptor is a view of an array in dimensions, of which blocks are read and written. Elements
// outside read as zero and are not written.
type descriptor struct {
	at             int64
	sizes, strides []int64
}

func (a *array) size() int64 { return int64(len(a.data) / (bits(a.elem) / 8)) }

// read gives the bits of an element.
func (a *array) read(at int64, program int32) (uint64, error) {
	if at < 0 || at >= a.size() {
		return 0, fmt.Errorf("a load at %d of %s, which has %d elements", at, a.name, a.size())
	}
	if a.kept && a.writer[at] == 0 {
		if last := a.reader[at]; last != 0 && last != program {
			program = -1 // two read it: no one may write it
		}
		a.reader[at] = program
	} else if a.result && a.writer[at] != program {
		return 0, fmt.Errorf("a load of element %d of %s, which this program has not written", at, a.name)
	}
	n := int64(bits(a.elem) / 8)
	var u uint64
	for i := range n {
		u |= uint64(a.data[at*n+i]) << (8 * i)
	}
	return u, nil
}

// write sets the bits of an element.
func (a *array) write(at int64, u uint64, program int32) error {
	switch {
	case at < 0 || at >= a.size():
		return fmt.Errorf("a store at %d of %s, which has %d elements", at, a.name, a.size())
	case !a.result:
		return fmt.Errorf("a store to operand %s", a.name)
	case a.writer[at] != 0 && a.writer[at] != program:
		return fmt.Errorf("programs %d and %d both write element %d of %s", a.writer[at]-1, program-1, at,
			a.name)
	case a.reader[at] != 0 && a.reader[at] != program:
		return fmt.Errorf("program %d writes element %d of %s, which another reads", program-1, at,
			a.name)
	}
	a.writer[at] = program
	n := int64(bits(a.elem) / 8)
	for i := range n {
		a.data[at*n+i] = byte(u >> (8 * i))
	}
	return nil
}

// load reads where a mask holds; a nil mask holds everywhere.
func (m *machine) load(p, mask, other *block, t typ) (*block, error) {
	out := t.block()
	for i := range out.count() {
		if mask != nil && mask.ints[i] == 0 {
			if other != nil {
				out.decode(i, other.encode(i))
			}
			continue
		}
		u, err := p.array.read(p.ints[i], m.program)
		if err != nil {
			return nil, err
		}
		out.decode(i, u)
	}
	return out, nil
}

// store writes where a mask holds.
func (m *machine) store(p, v, mask *block) error {
	for i := range v.count() {
		if mask != nil && mask.ints[i] == 0 {
			continue
		}
		if err := p.array.write(p.ints[i], v.encode(i), m.program); err != nil {
			return err
		}
	}
	return nil
}

// places calls f for each element of a block at indices of a descriptor: its number in the block,
// its place in the array, and whether the array has it.
func (d *descriptor) places(index []*block, shape []int,
	f func(i int, at int64, inside bool) error) error {
	if len(index) != len(shape) || len(shape) != len(d.sizes) {
		return fmt.Errorf("%d indices of a block %v in %v", len(index), shape, d.sizes)
	}
	inner := strides(shape)
	n := typ{shape: shape}.count()
	for i := range n {
		at, inside := d.at, true
		for k := range shape {
			x := index[k].ints[0] + int64(i/inner[k]%shape[k])
			at += x * d.strides[k]
			inside = inside && x >= 0 && x < d.sizes[k]
		}
		if err := f(i, at, inside); err != nil {
			return err
		}
	}
	return nil
}
