// Command overlap compiles the gradient program of plans for their clusters and prints how much of
// its communication the schedule hides. No GPU is used.
package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/deepwell/deepwell/capture"
	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/internal/pjrt"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/overlap"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/plugin"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/step"
)

func main() {
	flags := map[string]any{}
	flag.Func("set", "a compile option as NAME=VALUE; may be given again", func(text string) error {
		name, value, ok := strings.Cut(text, "=")
		if !ok {
			return fmt.Errorf("%q is not NAME=VALUE", text)
		}
		flags[name] = value
		if value == "true" || value == "false" {
			flags[name] = value == "true"
		}
		return nil
	})
	asJSON := flag.Bool("json", false, "print the whole report as JSON")
	perKernel := flag.Bool("kernels", false,
		"print the kernels of each loop's round, and outside of loops")
	flag.Parse()
	plans := flag.Args()
	if len(plans) == 0 {
		plans = []string{"examples/plans/llama3.1-405b-64xb200.json",
			"examples/plans/llama3.1-405b-1024xb200.json"}
	}
	if err := run(context.Background(), plans, flags, *asJSON, *perKernel); err != nil {
		fmt.Fprintln(os.Stderr, "overlap:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, plans []string, flags map[string]any,
	asJSON, perKernel bool) error {
	dir, err := plugin.DefaultDir(os.Getenv)
	if err != nil {
		return err
	}
	bundle, err := plugin.Open(ctx, dir, "cuda13")
	if err != nil {
		return err
	}
	xla, err := pjrt.Load(bundle.Plugin, bundle.Preload...)
	if err != nil {
		return err
	}
	for _, path := range plans {
		stage, cluster, err := write(path)
		if err != nil {
			return err
		}
		start := time.Now()
		m, err := compile(xla, bundle, stage, cluster, flags)
		if err != nil {
			return err
		}
		took := time.Since(start)
		rates, err := overlap.RatesOf(cluster.GPU)
		if err != nil {
			return err
		}
		r, err := overlap.Read(m, cluster, rates)
		if err != nil {
			return err
		}
		if asJSON {
			text, err := r.JSON()
			if err != nil {
				return err
			}
			fmt.Printf("%s\n", text)
			continue
		}
		fmt.Printf("%s: compiled in %.0f s, %d instructions of XLA's own recomputation\n%s\n", path,
			took.Seconds(), len(m.Remat()), r)
		for _, l := range r.Loops {
			if perKernel {
				table(l)
			}
		}
		if perKernel {
			table(overlap.Loop{Body: "outside of loops", Kernels: r.Kernels})
		}
	}
	return nil
}

// table prints the kernels of a loop's round, the largest first.
func table(l overlap.Loop) {
	bytes, n := l.Moved()
	of := ""
	if l.Twice {
		of = ", a half of each round"
	}
	fmt.Printf("%s: %d kernels beside GEMMs move %.3f GB%s\n", l.Body, n, float64(bytes)/1e9, of)
	slices.SortStableFunc(l.Kernels, func(a, b overlap.Kernel) int {
		return cmp.Compare(b.Bytes, a.Bytes)
	})
	for _, k := range l.Kernels {
		fmt.Printf("%10.1f MB %8.1f µs  %-40s %-34s %-30s %s\n", float64(k.Bytes)/1e6, 1e6*k.Seconds,
			k.Name, k.Shape, k.Target, k.OpName)
	}
}

// write gives the gradient program of a plan, as `deepwell compile` writes it.
func write(path string) (*program.Module, machine.Cluster, error) {
	var none machine.Cluster
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, none, err
	}
	p, err := plan.Parse(text, path)
	if err != nil {
		return nil, none, err
	}
	cluster, err := machine.ParseCluster(p.Cluster)
	if err != nil {
		return nil, none, err
	}
	m, err := capture.Open(p.Model, capture.Options{})
	if err != nil {
		return nil, none, err
	}
	defer func() { _ = m.Close() }()
	w, err := step.Build(step.Spec{Model: m.Config, Recipe: step.RecipeOf(p), Arch: cluster.GPU.Arch,
		Plan: p, Kernels: kernels.Options{Named: true}})
	if err != nil {
		return nil, none, err
	}
	return w.Find(step.Gradient, 0).Module, cluster, nil
}

// compile compiles a stage with the options of engine.Compiler, which gives away the account of a
// program but not its schedule. cuDNN's plans are left out: they do not change the schedule.
func compile(xla *pjrt.Plugin, b *plugin.Bundle, s *program.Module, t machine.Cluster,
	flags map[string]any) (*hlo.Module, error) {
	topology, err := xla.NewTopology([]pjrt.Option{
		{Name: "target_config", Value: t.ConfigText(b.CuDNN)},
		{Name: "topology", Value: t.Topology()},
	})
	if err != nil {
		return nil, err
	}
	defer topology.Free()
	all := map[string]any{
		"xla_gpu_cuda_data_dir": b.DataDir, "xla_gpu_autotune_level": 0,
		"xla_gpu_shard_autotuning": false, "xla_gpu_enable_triton_gemm": false,
		"xla_gpu_deviceless_cub_mode":          "DEVICELESS_CUB_DISABLED",
		"xla_gpu_pipeline_all_gather":          "COLLECTIVE_PIPELINING_MODE_EXPLICIT",
		"xla_gpu_collective_domain_assignment": "scale_up_fabric",
	}
	maps.Copy(all, s.Flags)
	maps.Copy(all, flags)
	x, err := topology.Compile([]byte(s.Text), pjrt.CompileOptions{Devices: s.Devices,
		DeviceMemory: t.MemoryBytes(), Flags: all})
	if err != nil {
		return nil, err
	}
	defer x.Free()
	return x.Optimized()
}
