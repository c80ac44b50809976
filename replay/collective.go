package replay

import (
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/wire"
)

// deviceGroups are the devices of a collective, written out. None is one group of all devices.
type deviceGroups struct {
	lists   [][]int64
	unknown string // an encoding that replay does not read
}

// maxGroupDevices bounds the devices of groups that are written as an iota.
const maxGroupDevices = 1 << 16

// decode reads one of the fields that say which devices take part.
func (g *deviceGroups) decode(f wire.Field) (err error) {
	switch f.Num {
	case 49: // replica_groups
		err = g.add(f.B)
	case 87: // collective_device_list
		err = wire.Into{1: g.add, 2: g.addIota}.Read(f.B)
	case 92: // iota_collective_device_list
		err = g.addIota(f.B)
	case 93: // mesh_axes_replica_group_list
		g.unknown = "axes of a mesh"
	}
	return err
}

// add reads a ReplicaGroup.
func (g *deviceGroups) add(msg []byte) error {
	var ids []int64
	err := wire.Into{1: &ids}.Read(msg)
	g.lists = append(g.lists, ids)
	return err
}

// addIota reads an IotaReplicaGroupListProto: the numbers 0, 1, 2, … laid out in an array,
// transposed, and split into groups of equal length.
func (g *deviceGroups) addIota(msg []byte) error {
	var count, size int64
	var dims, perm []int64
	// num_replica_groups, num_devices_per_group, iota_reshape_dims, iota_transpose_perm
	if err := (wire.Into{1: &count, 2: &size, 3: &dims, 4: &perm}).Read(msg); err != nil {
		return err
	}
	if len(dims) == 0 {
		dims = []int64{count * size}
	}
	if len(perm) == 0 {
		for i := range dims {
			perm = append(perm, int64(i))
		}
	}
	small := count > 0 && size > 0 && count <= maxGroupDevices && size <= maxGroupDevices/count &&
		len(dims) <= maxRank
	total := int64(1)
	for _, d := range dims {
		if small = small && d > 0 && d <= maxGroupDevices; small {
			total = min(total*d, maxGroupDevices+1)
		}
	}
	if !small || total != count*size || !isPermutation(perm, len(dims)) {
		g.unknown = "an iota that is not well formed"
		return nil
	}
	for group := range slices.Chunk(iotaOrder(dims, perm), int(size)) {
		g.lists = append(g.lists, group)
	}
	return nil
}

// iotaOrder gives the numbers of an array of these dimensions in the order of its transpose.
func iotaOrder(dims, perm []int64) []int64 {
	strides := make([]int64, len(dims))
	stride := int64(1)
	for i, d := range slices.Backward(dims) {
		strides[i] = stride
		stride *= d
	}
	ids := []int64{0}
	for _, p := range perm { // the last dimension moves fastest
		var next []int64
		for _, id := range ids {
			for k := range dims[p] {
				next = append(next, id+k*strides[p])
			}
		}
		ids = next
	}
	return ids
}

// collectiveAttrs are the attributes of a collective: groups written out in the field that every
// version of XLA reads, and a channel of its own.
func (w *writer) collectiveAttrs(s *site) wire.Msg {
	if s.groups.unknown != "" {
		w.refuse(diag.ReplayGroups, "the devices of %s are given as %s", s.opcode, s.groups.unknown)
	}
	attrs := slices.Clone(s.kept)
	for _, ids := range s.groups.lists {
		attrs = attrs.Bytes(49, wire.Msg(nil).Packed(1, ids...))
	}
	if s.channel != 0 {
		w.channels++
		attrs = attrs.Int(26, w.channels)
	}
	return attrs
}

// checkCollective refuses a collective whose operands and results do not match.
func (w *writer) checkCollective(s *site, results int) {
	if len(s.values) != results || results == 0 {
		w.refuseProgram("%s has %d operands and %d results", s.name, len(s.values), results)
	}
}

// splitCollective rewrites a gather or a scatter as one collective for each operand, along
// dimension 0: XLA:CPU computes wrong numbers, without an error, for a gather of several operands
// along a dimension that is not the major one.
func (w *writer) splitCollective(s *site) *value {
	shapes := s.shape.results()
	w.checkCollective(s, len(shapes))
	if len(s.dims) != 1 {
		w.refuseProgram("%s has the dimensions %v", s.name, s.dims)
	}
	out := make([]*value, len(shapes))
	for i, to := range shapes {
		out[i] = w.alongFirst(s, i, to)
	}
	return w.together(s, out)
}

// alongFirst is a collective of one operand, along a dimension that is made the first.
func (w *writer) alongFirst(s *site, operand int, to *shape) *value {
	along := s.dims[0]
	rank := len(to.dims)
	if along < 0 || along >= int64(rank) || len(s.values[operand].shape.dims) != rank {
		w.refuseProgram("%s has no dimension %d", s.name, along)
	}
	perm := []int64{along}
	for i := range to.dims {
		if int64(i) != along {
			perm = append(perm, int64(i))
		}
	}
	x := w.transpose(s.values[operand], perm...)
	dims := slices.Clone(x.shape.dims)
	dims[0] = to.dims[along]
	opcode := strings.TrimSuffix(s.opcode, "-start")
	x = w.add(opcode, exact(x.shape.typ, dims...), append(w.collectiveAttrs(s), dimensions(0)...), x)
	x.called = w.callees(s)
	return w.transpose(x, inverse(perm)...)
}

// eachCollective rewrites a collective that has no dimension, one for each operand.
func (w *writer) eachCollective(s *site) *value {
	shapes := s.shape.results()
	w.checkCollective(s, len(shapes))
	out := make([]*value, len(shapes))
	for i := range shapes {
		out[i] = w.add(strings.TrimSuffix(s.opcode, "-start"), s.values[i].shape, w.collectiveAttrs(s),
			s.values[i])
		out[i].called = w.callees(s)
	}
	return w.together(s, out)
}

// allToAll rewrites an exchange: along a dimension, or of one operand for each peer.
func (w *writer) allToAll(s *site) *value {
	if len(s.dims) > 0 {
		return w.splitCollective(s)
	}
	return w.add(s.opcode, w.held(s.shape), w.collectiveAttrs(s), s.values...)
}

// collectiveStart is the older asynchronous form, whose result of a gather or a permute carries the
// operands before the results.
func (w *writer) collectiveStart(s *site) *value {
	now := *s
	if s.opcode != "all-reduce-start" {
		if !s.shape.isTuple() || len(s.shape.elems) < 2 {
			w.refuseProgram("%s has no operands in its result", s.name)
		}
		inner := *s.instruction
		inner.shape = s.shape.elems[1]
		now.instruction = &inner
	}
	var v *value
	if s.opcode == "all-gather-start" {
		v = w.splitCollective(&now)
	} else {
		v = w.eachCollective(&now)
	}
	s.scope.started[s.id] = &started{func() *value { return v }}
	return nil
}

// together makes a tuple of results where the instruction has one.
func (w *writer) together(s *site, out []*value) *value {
	if !s.shape.isTuple() {
		return out[0]
	}
	return w.tuple(out...)
}
