package deepwell

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

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

// peak is the dense BF16 rate of a number of them, in FLOP/s, which MFU is measured by; 0 for CPU
// devices, and for GPUs that the catalogue lacks.
func (d devices) peak(count int64) float64 {
	if len(d.gpus) == 0 {
		return 0
	}
	m, err := machine.FindGPUModel(d.gpus[0].Model)
	if err != nil {
		return 0
	}
	return m.Peak.BF16 * float64(count)
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
	host, err := probeGPUs(ctx)
	if err != nil {
		return err
	}
	if len(host.GPUs) == 0 {
		if wanted == "" {
			if cluster != nil { // on a host that was rented for its GPUs a person must see it
				r.env.Events.Emit(event.Note{Text: fmt.Sprintf("the plan for %s runs on CPU devices: this"+
					" host has no GPU, %s", cluster, firstNote(host))})
			}
			return nil
		}
		return noGPU(host)
	}
	if err := r.takeGPUs(host, cluster); err != nil {
		return err
	}
	r.inspect(host, r.devices.gpus)
	return nil
}

// probeGPUs examines the host: of its GPUs, what CUDA shows this process. That CUDA hides all of
// them is an error: CPU devices are used only where there is no GPU, or somebody asks for them.
func probeGPUs(ctx context.Context) (*machine.Machine, error) {
	host, err := machine.Probe(ctx, machine.Options{Identify: true})
	if err != nil {
		return nil, err
	}
	if list, ok := os.LookupEnv(visibleDevices); ok && len(host.GPUs) > 0 {
		if host.GPUs = visibleGPUs(host.GPUs, list); len(host.GPUs) == 0 {
			host.Notes = []string{fmt.Sprintf("%s=%s shows none", visibleDevices, list)}
			return nil, noGPU(host)
		}
	}
	return host, nil
}

// visibleDevices names the GPUs that CUDA shows a process.
const visibleDevices = "CUDA_VISIBLE_DEVICES"

// visibleGPUs are the GPUs that CUDA shows with a value of CUDA_VISIBLE_DEVICES, in its order:
// numbers, or the beginnings of UUIDs. As CUDA does, it ends at the first that is not there. NVML
// shows all GPUs whatever stands there.
func visibleGPUs(all []machine.GPU, list string) (seen []machine.GPU) {
	for word := range strings.SplitSeq(list, ",") {
		word = strings.TrimSpace(word)
		n, err := strconv.Atoi(word)
		at := slices.IndexFunc(all, func(g machine.GPU) bool {
			return err == nil && g.Index == n || err != nil && word != "" && strings.HasPrefix(g.UUID, word)
		})
		if at < 0 {
			break
		}
		seen = append(seen, all[at])
	}
	return seen
}

// firstNote is what the probe remarks first, which is why it sees no GPU.
func firstNote(m *machine.Machine) string {
	switch {
	case len(m.Notes) > 0:
		return m.Notes[0]
	case m.Driver == "":
		return "no NVIDIA driver answers (libnvidia-ml.so.1)"
	}
	return "the NVIDIA driver shows none"
}

// noGPU is the error of a command that needs GPUs.
func noGPU(m *machine.Machine) *diag.Error {
	return diag.New(diag.GPUsMissing, "this host has no GPU").Because("%s", firstNote(m)).
		Try("install NVIDIA's driver, or start the container with its GPUs; or train on CPU devices:" +
			" --device cpu")
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
	if r.plan.Offloads(plan.Activations) && r.plan.FSDP.Size > 1 && r.plan.FSDP.Zero == 3 &&
		r.plan.FSDP.Gather == "layer" {
		// XLA miscompiles loops over layers that do both (docs/decisions/0021-gpu-runs.md).
		return diag.New(diag.PlanLater, "programs that offload activations and gather parameters layer"+
			" by layer give wrong gradients on GPUs").At("%s", r.job.Plan).
			Try("in the plan \"gather\": \"microbatch\", or recompute instead of \"offload\"")
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
		o.MemoryFraction, o.Ahead = gpuPool, r.plan.Ahead()
	}
	shared := r.devices.gpus != nil && len(r.job.Peers) > 1
	if shared {
		if err := r.joinClient(ctx, &o); err != nil {
			return err
		}
	}
	if err := r.compareKernels(ctx, r.ownKernels); err != nil {
		return err
	}
	if r.engine, err = engine.Open(ctx, r.devices.engine(), o); err != nil {
		if shared { // the client often fails before it is known that a process is lost
			err = r.processes.Hub.Explain(err, 2*lostGrace)
		}
		return err
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

// lostGrace is how long a process goes on after another one was lost. The compiler and the client
// cannot be canceled, and what they make is of no use.
const lostGrace = 1500 * time.Millisecond

// joinClient meets the other processes of a run on GPUs: all of them share one client, and find
// each other through the store of process 0.
func (r *runner) joinClient(ctx context.Context, o *engine.Options) (err error) {
	if r.processes, err = r.listen(ctx); err != nil {
		return err
	}
	p := r.processes
	p.Client = true
	if r.job.OnStall != nil {
		p.Hub.Watch(func(_ link.Peer, err error) {
			if err != nil {
				time.AfterFunc(lostGrace, func() { r.job.OnStall(r.lost()) })
			}
		})
	}
	p.Join(max(1, int(r.plan.Size(plan.PipelineAxis))))
	r.store = p.Hub.Store(p.Self, p.Addresses)
	o.Node, o.Nodes, o.Store = p.Self, len(p.Addresses), r.store
	return r.checkOrder()
}

// gathered gives a value of every process to process 0, and what that makes of them to all. Each
// process has one call of its own and one for the outcome: thousands of processes make thousands.
func (r *runner) gathered(what string, mine []byte,
	merge func(all [][]byte, sep []byte) []byte) ([]byte, error) {
	p := r.processes
	if err := r.store.Put(fmt.Sprintf("%s/%d", what, p.Self), mine); err != nil {
		return nil, err
	}
	if p.Self == 0 {
		var all [][]byte
		for n := range p.Addresses {
			one, err := r.store.Get(fmt.Sprintf("%s/%d", what, n), p.Hub.StallTimeout)
			if err != nil {
				return nil, err
			}
			all = append(all, one)
		}
		if err := r.store.Put(what, merge(all, nil)); err != nil {
			return nil, err
		}
	}
	return r.store.Get(what, p.Hub.StallTimeout)
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
	ids, err := r.gathered("incarnation", id[:], bytes.Join)
	if err != nil {
		return err
	}
	if len(ids) != len(id)*len(all) {
		return diag.New(diag.PeersDiffer, "%d processes have incarnations of %d bytes", len(all),
			len(ids))
	}
	for n := range all {
		all[n] = engine.Process{Node: n, Incarnation: binary.LittleEndian.Uint64(ids[len(id)*n:]),
			Connected: true}
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
	if err != nil && r.processes != nil && r.processes.Client {
		wait := time.Duration(0)
		switch { // the link or NCCL may notice before heartbeats are missing
		case errors.Is(err, diag.LinkLost):
			wait = 2 * lostGrace
		case errors.Is(err, diag.CollectiveFailed):
			wait = r.processes.Hub.HeartbeatTimeout + lostGrace
		}
		if lost := r.processes.Hub.Explain(err, wait); r.lost() != nil {
			r.failed = true // a communicator that was given up may never be freed
			return lost
		}
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
	return train.FitsGPU(r.program, int64(gpuPool*float64(least)), train.HostMemory(), r.recipe,
		processes, nil)
}
