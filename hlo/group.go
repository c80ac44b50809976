package hlo

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/internal/wire"
)

// A Group says which devices take part in a collective, without listing them: 65,536 devices
// take no more room than 8.
type Group struct {
	Count int64 `json:"count,omitzero"` // how many groups work side by side
	Size  int64 `json:"size,omitzero"`  // devices in a group; the largest, where they differ
	Least int64 `json:"least,omitzero"` // devices in the smallest group, where they differ; else 0

	// Stride is the distance from one member's number to the next, where it is the same in every
	// group: 1 for neighbours, 8 for the same place on hosts of eight. It is 0 for any other
	// pattern and for groups of one.
	Stride int64 `json:"stride,omitzero"`

	// Pairs counts the source and target pairs of a collective-permute, which has no groups.
	Pairs int64 `json:"pairs,omitzero"`
}

// String gives the group as a person says it: "8 groups of 4", "2 groups of 4, stride 2".
func (g Group) String() string {
	switch {
	case g.Pairs > 0:
		return count(g.Pairs, "pair")
	case g.Count == 0:
		return "all devices"
	}
	text := fmt.Sprintf("%s of %d", count(g.Count, "group"), g.Size)
	if g.Least > 0 {
		text = fmt.Sprintf("%s of %d to %d", count(g.Count, "group"), g.Least, g.Size)
	}
	if g.Stride > 1 {
		text += fmt.Sprintf(", stride %d", g.Stride)
	}
	return text
}

func count(n int64, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// A tally sums up groups that are written out device by device.
type tally struct {
	count, least, most int64
	stride             int64
	uneven             bool // the stride is not the same everywhere
}

// addGroup reads one ReplicaGroup.
func (t *tally) addGroup(msg []byte) (err error) {
	var n, last int64
	for f := range wire.Fields(msg, &err) {
		if f.Num != 1 { // replica_ids
			continue
		}
		for id := range f.Ints(&err) {
			if n > 0 {
				t.step(id, last)
			}
			n, last = n+1, id
		}
	}
	if t.count == 0 || n < t.least {
		t.least = n
	}
	t.count++
	t.most = max(t.most, n)
	return err
}

// step notes the distance between two neighbours in a group.
func (t *tally) step(id, last int64) {
	d := id - last
	if t.stride == 0 {
		t.stride = d
	}
	if d != t.stride || d <= 0 {
		t.uneven = true
	}
}

func (t *tally) group() Group {
	g := Group{Count: t.count, Size: t.most}
	if t.least != t.most {
		g.Least = t.least
	}
	if !t.uneven {
		g.Stride = t.stride
	}
	return g
}

// decodeDeviceList reads a CollectiveDeviceListProto. Plugins before 2026 could put an iota list
// into its field 2; newer ones have a field of the instruction for that.
func decodeDeviceList(msg []byte) (_ Group, err error) {
	var t tally
	for f := range wire.Fields(msg, &err) {
		switch f.Num {
		case 1: // replica_groups
			err = t.addGroup(f.B)
		case 2: // iota_replica_group_list
			return decodeIota(f.B)
		}
	}
	return t.group(), err
}

// A digit is one place of a mixed-radix number: how many values it has, and how far the device
// number moves when it goes up by one.
type digit struct{ size, stride int64 }

// decodeIota reads an IotaReplicaGroupListProto: the numbers 0, 1, 2, … laid out in an array,
// transposed, and split into groups of equal length.
func decodeIota(msg []byte) (g Group, err error) {
	var dims, perm []int64
	// num_replica_groups, num_devices_per_group, iota_reshape_dims, iota_transpose_perm
	err = wire.Into{1: &g.Count, 2: &g.Size, 3: &dims, 4: &perm}.Read(msg)
	g.Count, g.Size = max(g.Count, 0), max(g.Size, 0)
	digits := rowMajor(dims)
	if len(dims) == 0 {
		digits = rowMajor([]int64{satMul(g.Count, g.Size)})
	}
	if transposed, ok := permute(digits, perm); ok {
		g.Stride = regular(transposed, g.Size)
	}
	return g, err
}

// rowMajor gives the digits of an index into an array of these dimensions.
func rowMajor(dims []int64) []digit {
	digits := make([]digit, len(dims))
	stride := int64(1)
	for i, d := range slices.Backward(dims) {
		digits[i] = digit{max(d, 0), stride}
		stride = satMul(stride, max(d, 0))
	}
	return digits
}

// permute puts the digits in the order of perm; no perm leaves them as they are.
func permute(digits []digit, perm []int64) ([]digit, bool) {
	if len(perm) == 0 {
		return digits, true
	}
	if len(perm) != len(digits) {
		return nil, false
	}
	out := make([]digit, len(perm))
	for i, p := range perm {
		if p < 0 || p >= int64(len(digits)) {
			return nil, false
		}
		out[i] = digits[p]
	}
	return out, true
}

// regular gives the one distance between neighbours when the numbers that the digits count
// through are split into groups of the given size, or 0 if there is no such distance.
func regular(digits []digit, size int64) int64 {
	if size <= 1 {
		return 0
	}
	var low digit // the minor digits, joined while they continue each other
	for _, d := range slices.Backward(digits) {
		switch {
		case d.size == 1:
		case low.size == 0:
			low = d
		case d.stride == satMul(low.size, low.stride):
			low.size = satMul(low.size, d.size)
		default:
			return fit(low, size)
		}
	}
	return fit(low, size)
}

func fit(low digit, size int64) int64 {
	if low.size == 0 || low.size%size != 0 {
		return 0
	}
	return low.stride
}

// decodeMeshAxes reads a MeshAxesReplicaGroupListProto: the devices form a mesh, and those that
// differ only along the named axes are a group.
func decodeMeshAxes(msg []byte) (_ Group, err error) {
	var sizes []int64
	var axes [][]byte
	plain := true // the devices are numbered along the mesh
	for f := range wire.Fields(msg, &err) {
		switch f.Num {
		case 1: // mesh
			sizes, plain, err = decodeMesh(f.B)
		case 2: // axes
			axes = append(axes, f.B)
		}
	}
	if err != nil {
		return Group{}, err
	}
	mesh := rowMajor(sizes)
	total, size := int64(1), int64(1)
	for _, d := range mesh {
		total = satMul(total, d.size)
	}
	var digits []digit
	for _, a := range axes {
		d, err := decodeAxis(a, mesh)
		if err != nil {
			return Group{}, err
		}
		digits = append(digits, d)
		size = satMul(size, d.size)
	}
	g := Group{Count: total / max(size, 1), Size: size}
	if plain {
		g.Stride = regular(digits, size)
	}
	return g, nil
}

// decodeMesh reads the sizes of a mesh's axes, and whether its devices are simply 0, 1, 2, ….
func decodeMesh(msg []byte) (sizes []int64, plain bool, err error) {
	plain = true
	for f := range wire.Fields(msg, &err) {
		switch f.Num {
		case 1: // axes
			var size int64
			err = wire.Into{2: &size}.Read(f.B)
			sizes = append(sizes, size)
		case 2, 3: // device_ids, iota_transform
			plain = false
		}
	}
	return sizes, plain, err
}

// decodeAxis reads an AxisRefProto: an axis of the mesh, or a part of one.
func decodeAxis(msg []byte, mesh []digit) (_ digit, err error) {
	var index, before, size int64
	// mesh_axis_index, sub_axis_info: pre_size, size
	err = wire.Into{1: &index, 2: wire.Into{1: &before, 2: &size}}.Read(msg)
	if err != nil {
		return digit{}, err
	}
	if index < 0 || index >= int64(len(mesh)) {
		return digit{}, fmt.Errorf("a device group names axis %d of a mesh of %d", index, len(mesh))
	}
	axis := mesh[index]
	if size <= 0 {
		return axis, nil
	}
	before = max(before, 1)
	after := axis.size / max(satMul(before, size), 1)
	return digit{size, satMul(axis.stride, max(after, 1))}, nil
}
