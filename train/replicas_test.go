package train

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/plantest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/internal/softgpu"
	"github.com/deepwell/deepwell/link"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/step"
)

// eightDevices opens eight CPU devices.
func eightDevices(t *testing.T) *engine.Engine {
	t.Helper()
	e, err := engine.Open(t.Context(), "cpu", engine.Options{Devices: 8, Cache: cache})
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	t.Cleanup(e.Close)
	return e
}

// twoSteps makes two updates.
func (p *parity) twoSteps(ctx context.Context, t *Trainer) error {
	for i := range 2 {
		if _, err := t.Gradients(ctx, p.rows(uint64(100+i), p.size)); err != nil {
			return err
		}
		if _, _, err := t.Update(ctx, p.rate); err != nil {
			return err
		}
	}
	return nil
}

// flip changes one bit of an array of a rank's state on one device.
func flip(t *testing.T, tr *Trainer, rank int, name string, device, bit int) {
	t.Helper()
	r := tr.exec.ranks[rank]
	a := r.state.Get(name)
	m := &program.Module{Name: "flip", Devices: r.devices,
		Mesh: tr.programs.Find(step.Update, rank).Module.Mesh}
	b, err := tr.opts.Engine.Place(m, a.Spec(), engine.Copied, func(i int) ([]byte, error) {
		data, err := a.Read(t.Context(), i)
		if err == nil && i == device {
			data[bit/8] ^= 1 << (bit % 8)
		}
		return data, err
	})
	if err != nil {
		t.Fatal(err)
	}
	r.state.Put(b)
}

// Whatever the plan, replicas have the same bits: of masters, moments, copies and quantized copies.
// Every 100 steps a comparison is far below one percent of the time.
func TestReplicasHaveTheSameBits(t *testing.T) {
	e := eightDevices(t)
	rows := plantest.Combine(3, append(plantest.Meshes(), plantest.Pipes()...)...)
	if !*plansAll {
		some := []string{"dp zero1 tp", "dp zero3 cp", "zero2 sp ring", "dp overlap 1f1b"}
		if !slowtest.Enabled {
			some = some[:1]
		}
		rows = slices.DeleteFunc(rows, func(r plantest.Row) bool { return !slices.Contains(some, r.Name) })
	}
	for _, row := range rows {
		for _, format := range []string{"", "mxfp8", "nvfp4"} {
			if format != "" && (row.Name != "dp zero1 tp" || !slowtest.Enabled) {
				continue
			}
			p := parityOf(e, strings.TrimPrefix(format+"/qwen3", "/"))
			p.hasty = true
			tr, err := p.start(t.Context(), p.plan(row), p.size, Options{Locked: true})
			if err != nil {
				t.Fatalf("%s: %v", row.Name, err)
			}
			if err = p.twoSteps(t.Context(), tr); err == nil {
				err = tr.checkReplicas(t.Context())
			}
			compared, sets := 0, 0
			for _, r := range tr.exec.hosted() {
				compared, sets = compared+len(r.replicas.arrays), sets+len(r.replicas.sets)
			}
			start := time.Now()
			if err == nil {
				err = tr.checkReplicas(t.Context())
			}
			t.Logf("%s %s: %d arrays, %d sets, %v", row.Name, format, compared, sets, time.Since(start))
			if err != nil || compared == 0 && row.Name != "zero3" {
				t.Errorf("%s %s: %d arrays are compared: %v", row.Name, format, compared, err)
			}
			tr.Close()
		}
	}
}

// One bit of one array on one of eight devices (dp 2, fsdp 2, tp 2) is found, whatever the array;
// where four devices have the shard, the one is named, and where two have it, the two. Nothing is
// saved, and the run does not go on.
func TestAFlippedBitIsFound(t *testing.T) {
	e := eightDevices(t)
	p := parityOf(e, "qwen3")
	p.hasty = true
	how := p.plan(plantest.Row{Apply: func(p *plan.Plan) {
		p.DP, p.FSDP, p.TP = 2, plan.FSDP{Size: 2, Zero: 2, Gather: "step"}, plan.TP{Size: 2}
	}})
	tr, err := p.start(t.Context(), how, p.size, Options{Locked: true})
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	tr.opts.Recipe.Out = t.TempDir()
	if err := p.twoSteps(t.Context(), tr); err != nil {
		t.Fatal(err)
	}
	if err := tr.Save(t.Context()); err != nil {
		t.Fatal(err)
	}
	check := tr.exec.ranks[0].replicas
	seen := map[program.Role]map[int]bool{}
	for _, s := range check.sets {
		for n, at := range s.arrays {
			a := check.arrays[at]
			device := (3 + 5*n) % 8
			local := tr.exec.ranks[0].state.Get(a.Name).Local()
			bit := (17 * n) % int(8*local.Bytes())
			others := replicasOf(s, device)
			if seen[a.Role] == nil {
				seen[a.Role] = map[int]bool{}
			}
			if seen[a.Role][len(others)] {
				continue
			}
			seen[a.Role][len(others)] = true
			flip(t, tr, 0, a.Name, device, bit)
			err := tr.checkReplicas(t.Context())
			if err == nil || diag.From(err).Code != diag.ReplicasDiffer {
				t.Fatalf("bit %d of %s on device %d of %v: %v", bit, a.Name, device, others, err)
			}
			host, _ := os.Hostname()
			for i := range 8 {
				suspect := i == device || len(others) == 2 && slices.Contains(others, i)
				if strings.Contains(err.Error(), "device "+string(rune('0'+i))+" of "+host) != suspect {
					t.Errorf("%s on device %d of %v: %v", a.Name, device, others, err)
				}
			}
			if !strings.Contains(err.Error(), "bits of "+a.Name) || !strings.Contains(err.Error(), "step 2") {
				t.Errorf("%s on device %d: %v", a.Name, device, err)
			}
			flip(t, tr, 0, a.Name, device, bit)
			tr.spent = nil
		}
	}
	if err := tr.checkReplicas(t.Context()); err != nil {
		t.Fatal(err)
	}

	// A save does not write such a state, and closes the trainer for good.
	flip(t, tr, 0, check.arrays[0].Name, 6, 1)
	tr.step++
	if err := tr.Save(t.Context()); diag.From(err).Code != diag.ReplicasDiffer {
		t.Errorf("Save: %v", err)
	}
	if found, err := filepath.Glob(filepath.Join(tr.folder(), "step-*")); err != nil || len(found) != 1 {
		t.Errorf("%v: %v", found, err)
	}
	if err := tr.Save(t.Context()); diag.From(err).Code != diag.TrainerClosed {
		t.Errorf("Save again: %v", err)
	}
}

// replicasOf lists the devices with the same shard as one.
func replicasOf(s replicaSet, device int) (list []int) {
	for i, first := range s.first {
		if first == s.first[device] {
			list = append(list, i)
		}
	}
	return list
}

// Replicas of GPUs have the same bits, also where sums by atomic additions are made in another order
// on each: what they make is reduced before it is used. A flipped bit is found there, too.
func TestReplicasOnGPUs(t *testing.T) {
	slowtest.Only(t)
	if !softgpu.InChild(t) {
		out, status := softgpu.Run(t, softgpu.Options{GPUs: 4, Memory: 64 << 20, Order: 7})
		if status != 0 {
			t.Errorf("status %d\n%s", status, out)
		}
		return
	}
	e, err := engine.Open(t.Context(), "cuda13", engine.Options{Cache: cache})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	p := parities(e)["qwen3"]
	p.arch = "sm_100"
	tr, err := p.start(t.Context(), p.plan(plantest.Row{Apply: func(p *plan.Plan) {
		p.DP, p.TP, p.Attention = 2, plan.TP{Size: 2}, "plain"
	}}), p.size, Options{Locked: true})
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	if err := p.twoSteps(t.Context(), tr); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		start := time.Now()
		if err := tr.checkReplicas(t.Context()); err != nil {
			t.Fatal(err)
		}
		t.Log(time.Since(start))
	}
	for key, x := range tr.exec.ranks[0].digesters {
		if m, err := x.Memory(); err != nil || m.Temp > 1<<16 {
			t.Errorf("the digest of %s needs %d bytes: %v", key, m.Temp, err)
		}
	}
	norm := lists.Find(tr.exec.ranks[0].replicas.arrays, func(a program.Array) bool {
		return a.Split == nil // on all four
	})
	flip(t, tr, 0, norm.Name, 2, 9)
	err = tr.checkReplicas(t.Context())
	if diag.From(err).Code != diag.ReplicasDiffer || !strings.Contains(err.Error(), "GPU 2 of ") {
		t.Error(err)
	}
}

// What a wrong master is gathered into differs on more devices than the master: the master's are
// named.
func TestTheNearestToTheCauseIsNamed(t *testing.T) {
	list := func(split [][]string, role program.Role) program.Array {
		return program.Array{Name: string(role), Role: role, Split: split,
			Global: dtype.Shape{Type: dtype.F32, Dims: []int64{4}}}
	}
	k, err := newReplicaCheck([]program.Axis{{Name: "dp", Size: 3}, {Name: "fsdp", Size: 2}},
		program.Range(0, 6), []program.Array{list(nil, program.Copy),
			list([][]string{{"fsdp"}}, program.Param), list([][]string{{"fsdp", "dp"}}, program.Moment)})
	if err != nil || len(k.arrays) != 2 || len(k.sets) != 2 {
		t.Fatal(k, err)
	}
	all := map[replicaAt][]uint32{}
	for i := range 6 {
		all[replicaAt{0, i}] = []uint32{7, uint32(i % 2)} // the copy; the master
	}
	if k.suspicions(0, all) != nil {
		t.Error(k.suspicions(0, all))
	}
	all[replicaAt{0, 2}], all[replicaAt{0, 3}] = []uint32{8, 9}, []uint32{8, 1}
	got := k.suspicions(0, all)
	if len(got) != 2 || !slices.Equal(got[0].devices, []int{2, 3}) || got[0].right != 4 ||
		!slices.Equal(got[1].devices, []int{2}) || got[1].right != 2 {
		t.Errorf("%+v", got)
	}
	short := map[replicaAt][]uint32{}
	for at, row := range all {
		short[at] = k.fold(row)
	}
	if !k.differ(0, short) {
		t.Error("folded digests do not differ")
	}
	delete(short, replicaAt{0, 5})
	if !k.differ(0, short) {
		t.Error("a device without digests is not seen")
	}
}

// Any bit of any element changes the digest, in every type that a state has, and so do two signs.
func TestDigestsSeeEveryBit(t *testing.T) {
	e, err := engine.Open(t.Context(), "cpu", engine.Options{Devices: 2, Cache: cache})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	for _, elem := range []dtype.DType{dtype.F32, dtype.BF16, dtype.F16, dtype.F8E4M3FN, dtype.F8E5M2,
		dtype.F8E8M0FNU, dtype.F4E2M1FN, dtype.U8, dtype.S32, dtype.U32} {
		m := digestModule(dtype.Shape{Type: elem, Dims: []int64{3, 2, 4}}, program.Range(0, 2))
		x, err := e.Compile(t.Context(), m)
		if err != nil {
			t.Fatal(elem, err)
		}
		zero := make([]byte, m.Args[0].Global.Bytes())
		digest := func(data []byte) string {
			a, err := e.Place(m, m.Args[0], engine.Copied, func(int) ([]byte, error) { return data, nil })
			if err != nil {
				t.Fatal(err)
			}
			defer a.Free()
			run, err := x.Run(t.Context(), a)
			if err != nil {
				t.Fatal(err)
			}
			defer run.Free()
			one, err := run.Results[0].Read(t.Context(), 0)
			if err != nil {
				t.Fatal(err)
			}
			return string(one)
		}
		seen := map[string]bool{digest(zero): true}
		for bit := range 8 * len(zero) {
			data := slices.Clone(zero)
			data[bit/8] ^= 1 << (bit % 8)
			seen[digest(data)] = true
			if other := (bit + elem.Bits()) % (8 * len(zero)); bit < 8*len(zero)/2 {
				data[other/8] ^= 1 << (other % 8)
				seen[digest(data)] = true
			}
		}
		if want := 1 + 12*len(zero); len(seen) != want {
			t.Errorf("%s: %d states have %d digests", elem, want, len(seen))
		}
		x.Free()
	}
}

// Processes of one client get the digests of all of them, and all the same words for a difference.
func TestProcessesShareDigests(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var hubs [3]*link.Hub
	var addresses []string
	for i := range hubs {
		var err error
		if hubs[i], err = link.Listen(ctx, "127.0.0.1:0", 7, nil, event.Discard); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = hubs[i].Close() }()
		addresses = append(addresses, hubs[i].Addr())
	}
	rows := []map[replicaAt][]uint32{{{0, 0}: {1, 2}, {0, 1}: {3, 4}}, {}, {{1, 0}: {5}}}
	want := maps.Clone(rows[0])
	maps.Copy(want, rows[2])
	var all sync.WaitGroup
	for self := range hubs {
		all.Go(func() {
			p := &Processes{Self: self, Addresses: addresses, Hub: hubs[self], Client: true}
			x := p.connect(nil)
			defer x.close()
			got, err := x.share(ctx, "digests", rows[self])
			if err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("process %d has %v: %v", self, got, err)
			}
			text, err := x.first(ctx, "differ", []string{"", "", "device 5"}[self])
			if err != nil || text != "device 5" {
				t.Errorf("process %d has %q: %v", self, text, err)
			}
		})
	}
	all.Wait()
}
