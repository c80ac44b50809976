package train

import (
	"cmp"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/step"
)

// FitsHost returns an error if this process needs more memory than the tightest limit leaves. It
// allocates nothing, so a model that does not fit is refused before its state is filled. Devices of
// the CPU engine use host memory: everything that they hold is counted. needs reports what the
// compiler needs for a program; nil is before compiling, when temporary memory is unknown and only
// the certain part is counted.
func FitsHost(p *step.Programs, limits []machine.MemoryLimit, r *recipe.Recipe,
	processes *Processes, needs func(*program.Module) step.Needs) error {
	if len(limits) == 0 {
		return nil
	}
	compiled := needs != nil
	if !compiled {
		needs = func(*program.Module) step.Needs { return step.Needs{} }
	}
	foot, err := hostFootprint(p, processes, needs)
	if err != nil {
		return err
	}
	// Three moments compete: the peak of a step, filling, and saving (without gradients).
	resident := foot.Params + foot.Optimizer
	fill, save := hostBuffers(p, processes)
	need, why := foot.Sum()+foot.Host, hostCauses(foot)
	for _, other := range []struct {
		bytes int64
		name  string
	}{{fill, "buffers while the state is filled "},
		{save, "buffers while the state is saved "}} {
		if total := resident + other.bytes + foot.Hosted; total > need {
			need, why = total, residentCauses(foot)+" · "+other.name+event.Size(other.bytes)
		}
	}
	tightest := slices.MinFunc(limits, func(a, b machine.MemoryLimit) int {
		return cmp.Compare(a.Bytes, b.Bytes)
	})
	if need <= tightest.Bytes {
		return nil
	}
	least := ""
	if !compiled {
		least = "at least "
	}
	return diag.New(diag.HostMemory, "the run needs %s%s of memory, and %s are left", least,
		event.Size(need), event.Size(tightest.Bytes)).At("%s", tightest.Where).
		Because("%s", why).Try("%s", smaller(r, resident > tightest.Bytes,
		foot.Activations+foot.Temp > resident))
}

// FitsGPU returns an error if a rank of this process needs more memory on a GPU than bytes, which
// is what the engine's allocator has there, or more on the host than the limits leave. needs is as
// in [FitsHost].
func FitsGPU(p *step.Programs, bytes int64, limits []machine.MemoryLimit, r *recipe.Recipe,
	processes *Processes, needs func(*program.Module) step.Needs) error {
	least := ""
	if needs == nil {
		least = "at least "
		needs = func(*program.Module) step.Needs { return step.Needs{} }
	}
	if err := fitsBesideGPUs(p, bytes, limits, processes, needs); err != nil {
		return err
	}
	list, err := p.Footprints(needs)
	if err != nil {
		return err
	}
	for _, f := range list {
		if !processes.Hosts(f.Rank, len(list)) || f.Sum() <= bytes {
			continue
		}
		resident := f.Params + f.Optimizer
		return diag.New(diag.OutOfMemory, "a GPU needs %s%s of memory, and %s are left", least,
			event.Size(f.Sum()), event.Size(bytes)).At("pipeline rank %d", f.Rank).
			Because("%s", hostCauses(f)).
			Try("%s", smaller(r, resident > bytes, f.Activations+f.Temp > resident))
	}
	return nil
}

// poolTable is how much of a GPU's pool one byte of XLA's table of it on the host stands for: the
// allocator fills 8 bytes for each 256 at its first allocation, 5.6 GB for 180 GB.
const poolTable = 256 / 8

// fitsBesideGPUs returns an error if the host lacks memory for what GPUs with pools of some bytes
// need there: XLA's tables, what is offloaded, and buffers to fill and to save the state.
func fitsBesideGPUs(p *step.Programs, pool int64, limits []machine.MemoryLimit,
	processes *Processes, needs func(*program.Module) step.Needs) error {
	if len(limits) == 0 {
		return nil
	}
	foot, err := hostFootprint(p, processes, needs)
	if err != nil {
		return err
	}
	tables := int64(0)
	for rank, one := range p.Ranks {
		if processes.Hosts(rank, len(p.Ranks)) {
			tables += int64(len(one.Devices)) * pool / poolTable
		}
	}
	fill, save := hostBuffers(p, processes)
	buffers := max(fill, save)
	tightest := slices.MinFunc(limits, func(a, b machine.MemoryLimit) int {
		return cmp.Compare(a.Bytes, b.Bytes)
	})
	need := tables + max(foot.Host, foot.Hosted+buffers)
	if need <= tightest.Bytes {
		return nil
	}
	return diag.New(diag.HostMemory, "the run needs %s of the host's memory, and %s are left",
		event.Size(need), event.Size(tightest.Bytes)).At("%s", tightest.Where).
		Because("XLA's tables of the GPUs' memory %s · offloaded %s · buffers to fill and save %s",
			event.Size(tables), event.Size(foot.Host), event.Size(buffers)).
		Try("a host with more memory, fewer GPUs a host (--peers), or a plan that offloads less")
}

// smaller suggests settings with which a run needs less memory. Those that save activations are
// left out where parameters and optimizer state alone are too large, and come first where most of
// the memory is temporary.
func smaller(r *recipe.Recipe, stateAlone, temporary bool) string {
	var activations, state []string
	if r.Microbatch > 1 {
		activations = append(activations, "microbatch = 1")
	}
	if len(r.Recompute) == 0 {
		activations = append(activations, `recompute = "full"`)
	}
	activations = append(activations, "a smaller seq")
	if r.Optimizer.Moments == dtype.F32 {
		state = append(state, `optimizer.moments = "bf16"`)
	}
	state = append(state, "a smaller model")
	list := state
	switch {
	case stateAlone:
	case temporary:
		list = append(activations, state...)
	default:
		list = append(state, activations...)
	}
	return strings.Join(list, ", ") + ", or a plan over more devices or hosts (--plan, --peers)"
}

// hostFootprint sums the peak memory of all devices of this process.
func hostFootprint(p *step.Programs, processes *Processes,
	needs func(*program.Module) step.Needs) (*step.Footprint, error) {
	list, err := p.Footprints(needs)
	if err != nil {
		return nil, err
	}
	all := &step.Footprint{}
	largest := int64(-1)
	for _, f := range list {
		devices := int64(0)
		if processes.Hosts(f.Rank, len(list)) {
			devices = int64(len(p.Ranks[f.Rank].Devices))
		}
		all.Params += devices * f.Params
		all.Optimizer += devices * f.Optimizer
		all.Grads += devices * f.Grads
		all.Activations += devices * f.Activations
		all.Temp += devices * f.Temp
		all.Host += devices * f.Host
		all.Hosted += devices * f.Hosted
		if f.Temp > largest && devices > 0 {
			largest, all.Largest = f.Temp, f.Largest
		}
	}
	return all, nil
}

// residentCauses describes what stays in memory between steps.
func residentCauses(f *step.Footprint) string {
	return "parameters and optimizer state " + event.Size(f.Params+f.Optimizer+f.Hosted)
}

// hostCauses describes the peak of a step.
func hostCauses(f *step.Footprint) string {
	text := residentCauses(f) + " · gradients " + event.Size(f.Grads)
	if f.Activations > 0 {
		text += " · activations " + event.Size(f.Activations)
	}
	if f.Temp > 0 {
		text += " · temporary memory of " + f.Largest + " " + event.Size(f.Temp)
	}
	return text
}

// hostBuffers returns the host memory beside the state while it is filled and while it is saved,
// when there are no gradients. Filling makes one tensor of a layer whole on the host, as float32
// and as bytes, and reads a device's box of it; buffers are used again.
// Saving reads chunks, and layers where a shard has its dimensions in another order: at most a
// shard of them, or one ([snapshot.writers]). The leader may have to collect the state of processes
// that do not see its folder.
func hostBuffers(p *step.Programs, processes *Processes) (fill, save int64) {
	seen := map[string]bool{}
	joined := int64(0)
	for _, pc := range stateTensors(p) {
		if processes.Hosts(pc.rank, len(p.Ranks)) {
			fill = max(fill, 4*pc.tensors[0].Bytes())
			joined = max(joined, min(2*pc.bytes(), saveChunks+pc.heldBytes()))
		} else if processes.Leads() && !seen[pc.name] {
			save += pc.bytes()
		}
		seen[pc.name] = true
	}
	return fill, save + joined
}

// saveChunks is what the writers of a checkpoint hold, two chunks each.
const saveChunks = 8 * 2 * 8 << 20

// heldBytes bounds the layers that are held while an array is saved.
func (pc *stateTensor) heldBytes() int64 {
	if pc.layout == nil {
		return 0
	}
	return max(pc.tensors[0].Bytes(), pc.layout.Stored.Shape().Elements()*int64(pc.elem.Bits()/8))
}

// fitsMemory is [FitsHost] or [FitsGPU] with what the compiler reported.
func (t *Trainer) fitsMemory() error {
	needs, err := t.needs()
	if err != nil {
		return err
	}
	if t.opts.Engine.Platform() != "cpu" {
		return FitsGPU(t.programs, t.opts.Engine.Capacity(), t.opts.Memory(), t.opts.Recipe,
			t.opts.Processes, needs)
	}
	return FitsHost(t.programs, t.opts.Memory(), t.opts.Recipe, t.opts.Processes, needs)
}

// reportMemory tells what was planned of a GPU's memory, and what XLA's allocator counted. CPU
// devices have no account.
func (t *Trainer) reportMemory() {
	inUse, peak, pool := t.opts.Engine.Pool()
	if pool == 0 {
		return
	}
	m := event.Memory{InUseBytes: inUse, PeakBytes: peak, PoolBytes: pool}
	if needs, err := t.needs(); err == nil {
		if list, err := t.programs.Footprints(needs); err == nil {
			for _, f := range list {
				if t.opts.Processes.Hosts(f.Rank, len(list)) {
					m.PlannedBytes = max(m.PlannedBytes, f.Sum())
				}
			}
		}
	}
	t.last.Memory = &m
	t.opts.Events.Emit(m)
}

// needs returns the compiler's report on the programs of this process.
func (t *Trainer) needs() (func(*program.Module) step.Needs, error) {
	byName := map[string]step.Needs{}
	largest, err := t.exec.ladder.largest(t.opts.Engine.Platform() != "cpu")
	if err != nil {
		return nil, err
	}
	for _, x := range append(t.exec.x.list(), largest...) {
		m, err := x.Memory()
		if err != nil {
			return nil, err
		}
		need := step.Needs{Temp: m.Temp, Output: m.Output, Alias: m.Alias, Host: m.Host}
		if need.Temp >= byName[x.Module().Name].Temp {
			byName[x.Module().Name] = need
		}
	}
	return func(module *program.Module) step.Needs { return byName[module.Name] }, nil
}
