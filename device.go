package deepwell

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/link"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/step"
	"github.com/deepwell/deepwell/train"
)

// The values of TrainJob.Device.
const (
	DeviceCPU = "cpu"
	DeviceGPU = "gpu"
)

// gpuEngine is the engine of NVIDIA GPUs; cuda13-run stands for it where it is installed.
const gpuEngine = "cuda13"

// devices is what a run's programs are built for, and what they run on: CPU devices if there are no
// GPUs.
type devices struct{ gpus []machine.GPU }

// arch is the architecture of programs: "cpu", or a GPU's such as "sm_100".
func (d devices) arch() string {
	if len(d.gpus) == 0 {
		return "cpu"
	}
	return d.gpus[0].Arch
}

// engine is the name of the engine that runs them.
func (d devices) engine() string {
	if len(d.gpus) == 0 {
		return "cpu"
	}
	return gpuEngine
}

// findDevices decides whether a run trains on GPUs or on CPU devices. A host with GPUs trains on
// them unless --device or the plan's cluster says cpu; CPU devices stand in for any cluster.
func (r *runner) findDevices(ctx context.Context) error {
	wanted := r.job.Device
	switch wanted {
	case "", DeviceGPU:
	case DeviceCPU:
		return nil
	default:
		return diag.New(diag.BadUsage, "there is no device %q", wanted).At("--device").
			Try("--device cpu, or --device gpu")
	}
	var cluster *machine.Cluster
	if r.plan != nil && r.plan.Cluster != "" {
		c, err := machine.ParseCluster(r.plan.Cluster)
		if err != nil {
			return err
		}
		if c.CPU() && wanted == "" {
			return nil
		}
		cluster = &c
	}
	host, err := machine.Probe(ctx, machine.Options{})
	if err != nil {
		return err
	}
	if len(host.GPUs) == 0 {
		if wanted == "" {
			return nil
		}
		return diag.New(diag.GPUsMissing, "this host has no GPU").
			Because("%s", firstNote(host)).Try("--device cpu; or deepwell doctor")
	}
	return r.takeGPUs(host, cluster)
}

// firstNote is what the probe remarks first, which is why it sees no GPU.
func firstNote(m *machine.Machine) string {
	if len(m.Notes) == 0 {
		return "the NVIDIA driver shows none"
	}
	return m.Notes[0]
}

// takeGPUs checks that the host has the GPUs that the plan is for, and enough of them.
func (r *runner) takeGPUs(host *machine.Machine, cluster *machine.Cluster) error {
	first := host.GPUs[0]
	need := 1
	if r.plan != nil {
		need = int(r.plan.Devices()) / max(1, len(r.job.Peers))
	}
	bad := func(format string, args ...any) *diag.Error {
		return diag.New(diag.GPUsMissing, format, args...).At("%s", r.job.Plan)
	}
	if n := len(host.GPUs); n < need {
		return bad("the plan needs %d GPUs on a host, and this one has %d", need, n).
			Try("deepwell plan ... --cluster %dx%s; or train on CPU devices: --device cpu", n, first.Model)
	}
	for _, g := range host.GPUs[:need] {
		if g.Arch != first.Arch || g.Arch == "" {
			return bad("GPU %d is %s (%s), GPU 0 %s (%s): a run needs GPUs of one kind", g.Index, g.Name,
				g.Arch, first.Name, first.Arch).Try("CUDA_VISIBLE_DEVICES with GPUs of one kind")
		}
	}
	if cluster != nil && !cluster.CPU() && cluster.Arch() != first.Arch {
		return bad("the plan is for %s (%s), and this host has %s (%s)", cluster.GPU.Title,
			cluster.Arch(), first.Name, first.Arch).
			Try("deepwell plan ... --cluster %dx%s", need, first.Model)
	}
	r.devices = devices{host.GPUs[:need]}
	r.env.Events.Emit(event.Phase{Verb: "train", Name: fmt.Sprintf("on %d × %s", need, first.Name)})
	return nil
}

// gpuPool is the fraction of a GPU's memory that XLA's allocator takes at the start. The rest is
// for CUDA's context, NCCL's buffers and libraries' workspaces outside of it; JAX's documentation
// calls up to 0.95 safe where nothing else uses the GPU.
const gpuPool = 0.95

// openEngine opens the devices of this process.
func (r *runner) openEngine(ctx context.Context) (err error) {
	o := engine.Options{Dir: r.env.Engines, Devices: 1, Cache: r.env.Cache, Environ: r.env.Environ,
		Events: r.early()}
	if r.plan != nil {
		o.Devices = int(r.plan.Devices()) / max(1, len(r.job.Peers))
	}
	if r.devices.gpus != nil {
		o.MemoryFraction = gpuPool
	}
	shared := r.devices.gpus != nil && len(r.job.Peers) > 1
	if shared {
		if err := r.joinClient(ctx, &o); err != nil {
			return err
		}
	}
	if r.engine, err = engine.Open(ctx, r.devices.engine(), o); err != nil {
		return cmp.Or(r.lost(), err)
	}
	if r.devices.gpus != nil && slices.ContainsFunc(r.program.List, callsCuDNN) {
		if err := r.engine.CheckCuDNN(); err != nil {
			return err
		}
	}
	switch {
	case shared:
		return r.watchClient()
	case len(r.job.Peers) > 0:
		r.processes, err = r.listen(ctx)
	}
	return err
}

// callsCuDNN reports whether a program has a call of cuDNN.
func callsCuDNN(p *step.Program) bool { return strings.Contains(p.Module.Text, "__cudnn$") }

// joinClient meets the other processes of a run on GPUs: all of them share one client, and find
// each other through the store of process 0.
func (r *runner) joinClient(ctx context.Context, o *engine.Options) (err error) {
	if r.processes, err = r.listen(ctx); err != nil {
		return err
	}
	p := r.processes
	p.Client = true
	p.Join(max(1, int(r.plan.Size(plan.PipelineAxis))))
	r.store = p.Hub.Store(p.Self, p.Addresses)
	o.Node, o.Nodes, o.Store = p.Self, len(p.Addresses), r.store
	return nil
}

// watchClient tells the client which processes there are, and when one goes: collectives that wait
// for it are given up, and what they computed is never used, since the next exchange of messages
// fails.
func (r *runner) watchClient() error {
	p, all := r.processes, make([]engine.Process, len(r.processes.Addresses))
	var id [8]byte
	if _, err := rand.Read(id[:]); err != nil {
		return err
	}
	if err := r.store.Put(fmt.Sprintf("incarnation/%d", p.Self), id[:]); err != nil {
		return err
	}
	for n := range all {
		theirs, err := r.store.Get(fmt.Sprintf("incarnation/%d", n), p.Hub.StallTimeout)
		if err != nil {
			return err
		}
		if len(theirs) != len(id) {
			return diag.New(diag.PeersDiffer, "process %d has an incarnation of %d bytes", n, len(theirs))
		}
		all[n] = engine.Process{Node: n, Incarnation: binary.LittleEndian.Uint64(theirs), Connected: true}
	}
	if err := r.engine.UpdateProcesses(all); err != nil {
		return err
	}
	var mu sync.Mutex
	p.Hub.Watch(func(peer link.Peer, err error) {
		mu.Lock()
		defer mu.Unlock()
		if err == nil {
			err = diag.New(diag.LinkLost, "%s has left the run", peer)
		}
		all[peer.Process].Connected, all[peer.Process].Err = false, err
		_ = r.engine.UpdateProcesses(all) // the engine may be closed: then nothing waits
	})
	return nil
}

// lost is why another process of the run was lost; nil if none was.
func (r *runner) lost() error {
	if r.processes == nil {
		return nil
	}
	return r.processes.Hub.Failure()
}

// gpuFailed says how to go on after an error of a GPU. CUDA gives the same error to every later
// call of the process, so nothing is freed: the process is to end, and another one goes on.
func (r *runner) gpuFailed(err error) error {
	if lost := r.lost(); err != nil && lost != nil && r.processes.Client {
		r.failed = true // a communicator that was given up may never be freed
		return lost
	}
	if !errors.Is(err, diag.DeviceFailed) && !errors.Is(err, diag.CollectiveFailed) {
		return err
	}
	r.failed = true
	return diag.From(err).Try("start the same command again: it goes on from the last checkpoint; if" +
		" it fails again, look for Xid in the kernel's log and at nvidia-smi -q")
}

// checkMemory refuses a model that does not fit into memory, the host's or a GPU's, before anything
// large is allocated.
func (r *runner) checkMemory() error {
	var processes *train.Processes
	if len(r.job.Peers) > 0 {
		processes = &train.Processes{Self: r.job.Self, Addresses: r.job.Peers}
	}
	if r.devices.gpus == nil {
		return train.FitsHost(r.program, train.HostMemory(), r.recipe, processes, nil)
	}
	least := r.devices.gpus[0].MemoryBytes
	for _, g := range r.devices.gpus {
		least = min(least, g.MemoryBytes)
	}
	return train.FitsGPU(r.program, int64(gpuPool*float64(least)), r.recipe, processes, nil)
}
