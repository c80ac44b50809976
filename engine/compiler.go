package engine

import (
	"context"
	"fmt"
	"maps"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/internal/cas"
	"github.com/deepwell/deepwell/internal/environ"
	"github.com/deepwell/deepwell/internal/pjrt"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/plugin"
	"github.com/deepwell/deepwell/program"
)

// A Compiler compiles for GPUs that are not at hand. It needs no driver. Several goroutines may
// compile with it at the same time.
type Compiler struct {
	plugin  *pjrt.Plugin
	bundle  *plugin.Bundle
	cudnn   string // version of the cuDNN that plans are made with, "" for none
	cache   cache
	environ *environ.Set
	ahead   bool // keep executables for engines

	mu         sync.Mutex
	topologies map[string]*pjrt.Topology // by what they describe
}

// compilerEngine is the engine that compiles for NVIDIA GPUs.
const compilerEngine = "cuda13"

// OpenCompiler loads the CUDA engine for compiling only. It uses the options Dir, Cache, Events and
// WithoutCuDNN and Ahead.
func OpenCompiler(ctx context.Context, o Options) (*Compiler, error) {
	variables, err := environ.Read(os.Environ())
	if err != nil {
		return nil, err
	}
	p, bundle, err := load(ctx, compilerEngine, o.Dir)
	if err != nil {
		return nil, err
	}
	c := &Compiler{plugin: p, bundle: bundle, cudnn: bundle.CuDNN, cache: newCache(o),
		environ: variables, ahead: o.Ahead}
	// cuDNN asks libcuda while it plans; where there is neither a driver nor a stand-in (Arm hosts
	// without a GPU) the compile goes without plans, and the report says so.
	if o.WithoutCuDNN || bundle.Stub == "" && !bundle.Driver {
		c.cudnn = ""
	}
	return c, nil
}

// Compile compiles one module for the cluster, or takes the result from the cache, and reports on
// it. The program is compiled in full, down to SASS and cuDNN plans, and not run. If XLA
// rematerializes on its own, the module is compiled again without (see disablePasses).
func (c *Compiler) Compile(ctx context.Context, m *program.Module, t machine.Cluster) (*Report,
	error) {
	r, _, err := c.report(ctx, m, t)
	return r, err
}

// Optimized compiles like Compile, and gives the program as XLA left it, in a format that
// [hlo.Read] knows, beside the report.
func (c *Compiler) Optimized(ctx context.Context, m *program.Module, t machine.Cluster) (r *Report,
	format string, code []byte, err error) {
	r, x, err := c.report(ctx, m, t)
	return r, x.Format, x.optimized, err
}

func (c *Compiler) report(ctx context.Context, m *program.Module, t machine.Cluster) (*Report,
	compiled, error) {
	if err := ctx.Err(); err != nil {
		return nil, compiled{}, diag.New(diag.Canceled, "stopped before compiling %s", m.Name).Wrap(err)
	}
	if err := m.Validate(); err != nil {
		return nil, compiled{}, err
	}
	if n := t.Devices(); len(m.Devices) > n {
		return nil, compiled{}, diag.New(diag.DeviceMismatch, "module %s runs on %d devices; %s has %d",
			m.Name, len(m.Devices), t.GPU.Title, n)
	}
	start := time.Now()
	ahead := ""
	if c.ahead && handsOver(m) {
		ahead = aheadKey(c.bundle.Version, t.GPU.Name, c.environ, m)
		if c.cache.has(ahead) {
			ahead = ""
		}
	}
	c.cache.events.Emit(event.Busy{Task: "compiling " + m.Name})
	x, cached, err := c.compiled(m, t, ahead != "")
	if err != nil {
		return nil, x, err
	}
	r, err := newReport(x, m, t)
	if err == nil && r.Recomputed > 0 && m.Flags[disablePasses] == nil {
		again := *m
		again.Flags = maps.Clone(m.Flags)
		if again.Flags == nil {
			again.Flags = map[string]any{}
		}
		again.Flags[disablePasses] = "rematerialization"
		if x, cached, err = c.compiled(&again, t, ahead != ""); err == nil {
			r, err = newReport(x, &again, t)
		}
	}
	if err != nil {
		return nil, x, err
	}
	if ahead != "" {
		c.cache.keep(ahead, programHead{x.signature, x.Seconds},
			func() ([]byte, error) { return x.code, nil })
	}
	r.Engine, r.CuDNN, r.Cached = compilerEngine+" "+c.bundle.Version, c.cudnn, cached
	r.settlePlans()
	r.Notes = append(r.Notes, "compiled, not run; no autotuning without a device")
	c.cache.events.Emit(event.Compiled{Module: m.Name, Target: t.GPU.Name, Devices: len(m.Devices),
		Seconds: time.Since(start).Seconds(), Cached: cached})
	return r, x, nil
}

// compiled is the part of a compiled program that a report needs, and the head of its cache entry.
type compiled struct {
	Memory    Memory
	Bytes     int64   // serialized size
	Seconds   float64 // compile time
	Format    string  // of the optimized program
	optimized []byte

	// code and signature are for an engine that loads it; only a fresh compile has them.
	code      []byte
	signature pjrt.Signature
}

// describeExecutable reads what a report needs from an executable.
func describeExecutable(x *pjrt.Executable) (c compiled, err error) {
	m, err := x.Memory()
	c.Memory = Memory(m)
	if err == nil {
		c.Format, c.optimized, err = x.OptimizedBytes()
	}
	return c, err
}

// compiled compiles a module, or finds it in the cache. The cache has XLA's optimized program, from
// which every report is made anew: a change of the report's format needs no new compile. With fresh
// the cache is not asked.
func (c *Compiler) compiled(m *program.Module, t machine.Cluster, fresh bool) (x compiled,
	cached bool, err error) {
	if err := checkDumps(m.Flags); err != nil {
		return x, false, err
	}
	options := c.options(m, t)
	encoded, err := options.Encode()
	if err != nil {
		return x, false, err
	}
	key := cas.Key([]byte(cacheVersion), []byte(c.bundle.Digest), []byte(c.cudnn),
		fmt.Append(nil, c.bundle.Driver), c.environ.Key(), // cuDNN asks libcuda while it plans
		[]byte(t.ConfigText(c.bundle.CuDNN)), []byte(t.Topology()), []byte(m.Text), encoded)
	kept := c.cache.unlessDumped(options.Flags, c.environ)
	cached = !fresh && kept.get(key, &x, func(code []byte) error {
		x.optimized = code
		return nil
	})
	if cached {
		return x, true, nil
	}
	topology, err := c.describe(t)
	if err != nil {
		return x, false, err
	}
	start := time.Now()
	made, err := topology.Compile([]byte(m.Text), options)
	if err != nil {
		return x, false, err
	}
	defer made.Free()
	seconds := time.Since(start).Seconds()
	// XLA opens cuDNN and starts ptxas by their names as it compiles.
	if err := c.bundle.Unchanged(); err != nil {
		return x, false, err
	}
	if x, err = describeExecutable(made); err != nil {
		return x, false, err
	}
	if x.code, err = made.Serialize(); err == nil && fresh {
		x.signature, err = made.Signature()
	}
	if err != nil {
		return x, false, err
	}
	x.Seconds, x.Bytes = seconds, int64(len(x.code))
	kept.keep(key, x, func() ([]byte, error) { return x.optimized, nil })
	return x, false, nil
}

// disablePasses turns XLA's own rematerialization off. XLA starts it when it estimates that memory
// is short, and its estimate counts in-place updates as copies: of 70B on 64 GB200 it saw 206 GiB
// where buffers take 125, and what it recomputed saved 0.06 GiB. Recomputation is the plan's.
const disablePasses = "xla_disable_hlo_passes"

// describe makes the PJRT topology of a cluster, once: all modules of a program share it, and
// 65,536 devices take 0.1 s.
func (c *Compiler) describe(t machine.Cluster) (*pjrt.Topology, error) {
	config, shape := t.ConfigText(c.bundle.CuDNN), t.Topology()
	c.mu.Lock()
	defer c.mu.Unlock()
	if known := c.topologies[shape+config]; known != nil {
		return known, nil
	}
	topology, err := c.plugin.NewTopology([]pjrt.Option{
		{Name: "target_config", Value: config}, {Name: "topology", Value: shape},
	})
	if err != nil {
		return nil, diag.New(diag.CompileFailed, "the compiler does not take %s as a target",
			t.GPU.Name).Wrap(err)
	}
	if c.topologies == nil {
		c.topologies = map[string]*pjrt.Topology{}
	}
	c.topologies[shape+config] = topology
	return topology, nil
}

// Close frees the topologies. Compiles that still run must be done.
func (c *Compiler) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, topology := range c.topologies {
		topology.Free()
	}
	c.topologies = nil
}

// options are the module's flags on top of what every program for the cluster's GPUs has and of
// what a compile without a device needs.
func (c *Compiler) options(m *program.Module, t machine.Cluster) pjrt.CompileOptions {
	flags := gpuFlags(t.GPU.Arch, c.bundle.DataDir, c.environ)
	maps.Copy(flags, devicelessFlags(c.cudnn != ""))
	if c.ahead {
		maps.Copy(flags, liveFlags())
	}
	maps.Copy(flags, m.Flags)
	memory := m.MemoryBytes
	if memory == 0 {
		memory = t.MemoryBytes()
	}
	return pjrt.CompileOptions{Devices: m.Devices, DeviceMemory: memory, Flags: flags}
}

// Report describes an executable of this engine, as [Compiler.Compile] does for another cluster.
func (x *Executable) Report() (*Report, error) {
	if err := x.alive(); err != nil {
		return nil, err
	}
	n := len(x.module.Devices)
	t := machine.Cluster{Count: n, Domains: 1, HostsPerDomain: 1, DevicesPerHost: n}
	t.GPU.Name = x.engine.platform
	made, err := describeExecutable(x.loaded.Executable)
	if err != nil {
		return nil, err
	}
	made.Seconds = x.loaded.seconds
	r, err := newReport(made, &x.module, t)
	if err == nil {
		r.Engine, r.Cached = x.engine.name+" "+x.engine.version, x.cached
	}
	return r, err
}

func newReport(x compiled, module *program.Module, t machine.Cluster) (*Report, error) {
	m, err := hlo.Read(x.Format, x.optimized)
	if err != nil {
		return nil, err
	}
	r := &Report{Version: reportVersion, Module: module.Name, Target: t.GPU.Name,
		Devices: len(module.Devices), Topology: t.Topology(), Memory: x.Memory,
		CapacityBytes: t.MemoryBytes(),
		Seconds:       x.Seconds, ExecutableBytes: x.Bytes, CustomCalls: m.CustomCalls(),
		Collectives: m.Collectives(), Recomputed: len(m.Remat())}
	if r.Recomputed > 0 {
		r.Notes = append(r.Notes,
			"the compiler recomputes to save memory, which the plan did not ask for")
	}
	return r, nil
}

// settlePlans marks each cuDNN call as compiled with its plan or without. A plan without workspace
// leaves no trace in the optimized program, but XLA makes all plans or fails, so the option that
// was set decides (nvptx_compiler.cc; the serialized program of one GEMM is 42 KB with its
// plan and 11 KB without).
func (r *Report) settlePlans() {
	missing := false
	for i, call := range r.CustomCalls {
		if !strings.HasPrefix(call.Target, "__cudnn$") {
			continue
		}
		r.CustomCalls[i].Plan = hlo.PlanCompiled
		if r.CuDNN == "" {
			r.CustomCalls[i].Plan = hlo.PlanMissing
			missing = true
		}
	}
	if missing {
		r.Notes = append(r.Notes, "peak excludes cuDNN workspace")
	}
}
