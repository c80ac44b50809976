package train

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/step"
)

// replicaSteps is how many steps lie between two comparisons of replicas, beside the one before
// each save. A comparison reads the state once on its device and sends a few bytes, so it takes a
// part of one step in a hundred.
const replicaSteps = 100

// A replicaCheck lists what several devices of a rank have, and must have with the same bits:
// parameters, moments and compute copies that an axis replicates.
type replicaCheck struct {
	arrays []program.Array
	sets   []replicaSet
}

// A replicaSet is the arrays that are sharded over the same axes: their replicas are on the same
// devices.
type replicaSet struct {
	arrays []int // indices into the check's
	// first[i] is the first device that has the same shard as device i. Both are places in the list
	// of the rank's devices.
	first []int
}

// A replicaAt is a device: a pipeline rank, and a place in the list of its devices.
type replicaAt struct{ rank, device int }

// checkReplicas compares what several devices have of the same parameters, in all processes. A GPU
// that computes wrongly, or whose memory changed, has other bits than the others: all processes
// return the same error, which names it. The state may then not be saved.
func (t *Trainer) checkReplicas(ctx context.Context) error {
	defer t.phase(phaseCompare)()
	defer t.span("compare replicas")()
	c := t.exec
	mine := map[replicaAt][]uint32{}
	for _, r := range c.hosted() {
		if err := c.digests(ctx, r, mine); err != nil {
			return err
		}
	}
	// First one digest for each set: at 100,000 GPUs, the digests of all arrays are 40 MB.
	short := map[replicaAt][]uint32{}
	for at, list := range mine {
		short[at] = c.ranks[at.rank].replicas.fold(list)
	}
	all, err := c.peers.share(ctx, "digests", short)
	if err != nil {
		return err
	}
	differ := false
	for _, r := range c.hosted() {
		differ = differ || r.replicas.differ(r.number, all)
	}
	if differ, err = c.peers.any(ctx, differ); err != nil || !differ {
		return err
	}
	if all, err = c.peers.share(ctx, "digests of arrays", mine); err != nil {
		return err
	}
	what := ""
	for _, r := range c.hosted() {
		if what == "" {
			what = c.blame(r, all)
		}
	}
	if what, err = c.peers.first(ctx, "replicas differ", what); err != nil {
		return err
	}
	err = diag.New(diag.ReplicasDiffer, "%s", what).At("step %d", t.step).
		Because("a device computed wrongly, or its memory changed; nothing of this state is saved").
		Try("test it with deepwell preflight and deepwell verify --gpu; with the GPU or its host"+
			" taken out, the same command goes on from %s", t.lastSaved())
	t.abandon(err, "replicas differ after step %d", t.step)
	return err
}

// lastSaved names the checkpoint that a run goes on from.
func (t *Trainer) lastSaved() string {
	if t.saved < 0 {
		return "the start: nothing is saved yet"
	}
	return fmt.Sprintf("the checkpoint of step %d", t.saved)
}

// digests adds the digests of a rank's arrays on the devices of this process. Arrays go one after
// the other: the CPU compiler writes the mixed elements of each to memory before it adds them.
func (c *executor) digests(ctx context.Context, r *rank, to map[replicaAt][]uint32) (err error) {
	var specs []program.Array
	for _, name := range r.state.Names() {
		specs = append(specs, r.state.Get(name).Spec())
	}
	mesh := c.t.programs.Find(step.Update, r.number).Module.Mesh
	if r.replicas, err = newReplicaCheck(mesh, r.devices, specs); err != nil {
		return err
	}
	for _, spec := range r.replicas.arrays {
		a := r.state.Get(spec.Name)
		x := r.digesters[a.Local().String()]
		if x == nil {
			end := c.t.phase(phaseCompile)
			x, err = c.t.opts.Engine.Compile(ctx, digestModule(a.Local(), r.devices))
			end()
			if err != nil {
				return err
			}
			r.digesters[a.Local().String()] = x
		}
		if err := r.digest(ctx, x, a, to); err != nil {
			return err
		}
	}
	return nil
}

// digest adds the digests of one array.
func (r *rank) digest(ctx context.Context, x *engine.Executable, a *engine.Array,
	to map[replicaAt][]uint32) error {
	run, err := x.Run(ctx, a)
	if err != nil {
		return err
	}
	defer run.Free()
	for i, id := range a.Devices() {
		b, err := run.Results[0].Read(ctx, i)
		if err != nil {
			return err
		}
		at := replicaAt{r.number, slices.Index(r.devices, id)}
		to[at] = append(to[at], binary.LittleEndian.Uint32(b))
	}
	return nil
}

// newReplicaCheck describes the replicas of a state. Arrays in the host's memory are left out: a
// digest would bring them to the device, and what is computed from them is compared there.
func newReplicaCheck(mesh []program.Axis, devices program.Devices,
	state []program.Array) (*replicaCheck, error) {
	m := &program.Module{Name: "replicas", Devices: devices, Mesh: mesh}
	k, sets := &replicaCheck{}, map[string]int{} // by the axes that shard
	for _, a := range state {
		if a.Role != program.Param && a.Role != program.Moment && a.Role != program.Copy ||
			a.Memory != "" {
			continue
		}
		axes, shards := "", 1
		for _, axis := range mesh {
			if slices.ContainsFunc(a.Split, func(d []string) bool { return slices.Contains(d, axis.Name) }) {
				axes, shards = axes+axis.Name+" ", shards*axis.Size
			}
		}
		if shards == len(devices) {
			continue // each device has its own
		}
		at, known := sets[axes]
		if !known {
			first, err := firsts(m, a)
			if err != nil {
				return nil, err
			}
			at = len(k.sets)
			sets[axes], k.sets = at, append(k.sets, replicaSet{first: first})
		}
		k.sets[at].arrays = append(k.sets[at].arrays, len(k.arrays))
		k.arrays = append(k.arrays, a)
	}
	return k, nil
}

// firsts gives, for each device, the first one that has the same shard of an array.
func firsts(m *program.Module, a program.Array) ([]int, error) {
	list, seen := make([]int, len(m.Devices)), map[string]int{}
	for i := range list {
		start, err := m.Start(a, i)
		if err != nil {
			return nil, err
		}
		key := fmt.Sprint(start)
		if _, ok := seen[key]; !ok {
			seen[key] = i
		}
		list[i] = seen[key]
	}
	return list, nil
}

// fold makes one digest for each set, in two halves.
func (k *replicaCheck) fold(digests []uint32) (list []uint32) {
	for _, s := range k.sets {
		h := fnv.New64a()
		for _, at := range s.arrays {
			_ = binary.Write(h, binary.LittleEndian, digests[at])
		}
		list = append(list, uint32(h.Sum64()), uint32(h.Sum64()>>32))
	}
	return list
}

// differ reports whether the folded digests of replicas differ in a rank.
func (k *replicaCheck) differ(rank int, all map[replicaAt][]uint32) bool {
	for n, s := range k.sets {
		for i, first := range s.first {
			mine, other := all[replicaAt{rank, i}], all[replicaAt{rank, first}]
			if len(mine) != 2*len(k.sets) || len(other) != len(mine) || // another process has others
				!slices.Equal(mine[2*n:2*n+2], other[2*n:2*n+2]) {
				return true
			}
		}
	}
	return false
}

// A suspicion is an array of which devices with the same shard have different bits.
type suspicion struct {
	array   program.Array
	devices []int // that differ from most of the others; all of them where there is no majority
	right   int   // devices that have what most have; 0 without a majority
}

// suspicions lists the arrays of a rank that differ, by digests of all of its devices.
func (k *replicaCheck) suspicions(rank int, all map[replicaAt][]uint32) (list []suspicion) {
	for _, s := range k.sets {
		replicas := map[int][]int{} // of a shard, by the first of them
		for i, first := range s.first {
			replicas[first] = append(replicas[first], i)
		}
		for _, at := range s.arrays {
			for first := range s.first {
				votes := map[uint32][]int{}
				for _, i := range replicas[first] {
					digest := uint32(0)
					if row := all[replicaAt{rank, i}]; at < len(row) {
						digest = row[at]
					}
					votes[digest] = append(votes[digest], i)
				}
				if len(votes) > 1 {
					list = append(list, judge(k.arrays[at], replicas[first], votes))
				}
			}
		}
	}
	return list
}

// judge tells the replicas that are in the majority from the others.
func judge(a program.Array, replicas []int, votes map[uint32][]int) suspicion {
	s := suspicion{array: a, devices: replicas}
	for _, same := range votes {
		if 2*len(same) > len(replicas) {
			s.right = len(same)
			s.devices = lists.Filter(replicas, func(i int) bool { return !slices.Contains(same, i) })
		}
	}
	return s
}

// blame says which device of a rank differs from its replicas; "" if none does. What is wrong in a
// master spreads to the copies that are gathered from it, so the fewest suspects are the nearest to
// the cause, and masters come before what is made of them.
func (c *executor) blame(r *rank, all map[replicaAt][]uint32) string {
	list := r.replicas.suspicions(r.number, all)
	if len(list) == 0 {
		return ""
	}
	order := []program.Role{program.Param, program.Moment, program.Copy}
	lists.Sort(list, func(a, b suspicion) int {
		return cmp.Or(len(a.devices)-len(b.devices),
			slices.Index(order, a.array.Role)-slices.Index(order, b.array.Role))
	})
	s := list[0]
	names := lists.Map(s.devices, func(i int) string { return c.deviceName(r.devices[i]) })
	if len(names) > 8 {
		names = append(names[:8], fmt.Sprintf("%d more", len(s.devices)-8))
	}
	who := strings.Join(names, " and ")
	what := fmt.Sprintf("%s has other bits of %s than the other %d devices with this shard", who,
		s.array.Name, s.right)
	switch {
	case s.right == 0:
		what = fmt.Sprintf("one of these has wrong bits of %s, of which they have the same shard: %s",
			s.array.Name, who)
	case len(s.devices) > 1:
		what = fmt.Sprintf("%s have other bits of %s than the other %d devices with this shard", who,
			s.array.Name, s.right)
	}
	if len(list) > 1 {
		what += fmt.Sprintf(" (and %d more shards differ)", len(list)-1)
	}
	return what
}

// deviceName names a device, its process and its host, for error messages.
func (c *executor) deviceName(id int) string {
	kind := "device"
	if c.t.opts.Engine.Platform() == "cuda" {
		kind = "GPU"
	}
	if c.peers == nil || !c.peers.Client {
		return fmt.Sprintf("%s %d of %s", kind, id, c.peers.whereabouts())
	}
	// Processes of one client have equally many devices, in order.
	all := c.t.opts.Engine.Devices()
	each := len(all) / len(c.peers.Addresses)
	n := min(id/max(each, 1), len(c.peers.Addresses)-1)
	return fmt.Sprintf("%s %d of process %d at %s (device %d of the run)", kind, id-n*each, n,
		c.peers.Addresses[n], id)
}

// whereabouts names this process and its host; p may be nil.
func (p *peers) whereabouts() string {
	if p != nil {
		return p.Processes.whereabouts(p.ranks)
	}
	return (*Processes)(nil).whereabouts(0)
}

// share gives the digests of all processes to each of them.
func (p *peers) share(ctx context.Context, what string,
	mine map[replicaAt][]uint32) (map[replicaAt][]uint32, error) {
	if p == nil || !p.Client { // a rank is in one process
		return mine, nil
	}
	var b []byte
	for at, list := range mine {
		head := []uint32{uint32(at.rank), uint32(at.device), uint32(len(list))}
		for _, x := range append(head, list...) {
			b = binary.LittleEndian.AppendUint32(b, x)
		}
	}
	blobs, err := p.blobs(ctx, what, b)
	if err != nil {
		return nil, err
	}
	all := map[replicaAt][]uint32{}
	for n, b := range blobs {
		words := make([]uint32, len(b)/4)
		for i := range words {
			words[i] = binary.LittleEndian.Uint32(b[4*i:])
		}
		for len(words) > 0 {
			if len(words) < 3 || uint64(len(words)) < 3+uint64(words[2]) {
				return nil, diag.New(diag.LinkShape, "process %d sends no digests", n).At("%s", what)
			}
			all[replicaAt{int(words[0]), int(words[1])}] = words[3 : 3+words[2]]
			words = words[3+words[2]:]
		}
	}
	return all, nil
}

// first gives all processes the first text that is not empty.
func (p *peers) first(ctx context.Context, what, text string) (string, error) {
	if p == nil {
		return text, nil
	}
	all, err := p.blobs(ctx, what, []byte(text))
	if err != nil {
		return "", err
	}
	return string(lists.Find(all, func(b []byte) bool { return len(b) > 0 })), nil
}
