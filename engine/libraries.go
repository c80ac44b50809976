package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/pjrt"
	"github.com/deepwell/deepwell/plugin"
)

// runEngine is the engine that runs on NVIDIA GPUs: compilerEngine and what a GPU host needs.
const runEngine = "cuda13-run"

// A library is one that XLA looks up by name as it runs. Where one is missing, XLA says that there
// is no GPU (NVML, the CUDA runtime) or ends the process in the first product (cuBLAS).
type library struct {
	soname string
	driver bool // comes with NVIDIA's driver, not with the engine
}

var libraries = []library{
	{"libcuda.so.1", true}, {"libnvidia-ml.so.1", true}, {"libcudart.so.13", false},
	{"libcublas.so.13", false}, {"libcublasLt.so.13", false}, {"libnccl.so.2", false},
}

// loadToRun is load for an engine that runs. On GPUs it takes cuda13-run, or else cuda13 where the
// host has the libraries that it lacks; a missing library is an error that names it.
func loadToRun(ctx context.Context, name, dir string) (*pjrt.Plugin, *plugin.Bundle, error) {
	if platformOf(name) != "cuda" {
		return load(ctx, name, dir)
	}
	p, bundle, err := load(ctx, runEngine, dir)
	if errors.Is(err, diag.EngineMissing) && name != runEngine {
		p, bundle, err = load(ctx, name, dir)
	}
	if err != nil {
		return nil, nil, err
	}
	return p, bundle, findLibraries(bundle)
}

const cuDNN = "libcudnn.so.9"

// CheckCuDNN returns an error if cuDNN does not open on the GPUs of this process: programs with its
// calls would be compiled, and fail as they run.
func (e *Engine) CheckCuDNN() error {
	path := cmp.Or(e.bundle.Library(cuDNN), cuDNN)
	err := pjrt.OpenCuDNN(path)
	if err == nil {
		return nil
	}
	return diag.New(diag.LibraryMissing, "cuDNN does not open on this host's GPUs").At("%s", path).
		Wrap(err).Try("deepwell engine install %s; or attention without it: a plan with"+
		" \"attention\": \"plain\"", runEngine)
}

// findLibraries returns an error for the first library that neither the engine nor the host has.
func findLibraries(bundle *plugin.Bundle) error {
	for _, l := range libraries {
		if !l.driver && bundle.Library(l.soname) != "" {
			continue
		}
		err := pjrt.Preload(l.soname)
		if err == nil {
			continue
		}
		e := diag.New(diag.LibraryMissing, "%s cannot be loaded, without which no GPU runs a program",
			l.soname).At("engine %s", bundle.Name).Wrap(err)
		if l.driver {
			return e.Try("install NVIDIA's driver, in a container with its compute and utility" +
				" capabilities; or train on CPU devices: --device cpu")
		}
		return e.Try("deepwell engine install %s", runEngine)
	}
	return nil
}

// versions are the libraries whose version is asked for: how, and how the number is written.
var versions = []struct {
	name, soname, function string
	stores                 bool // the function stores the number where its argument points
	major, minor           int  // divisors
}{
	{"cuda_runtime", "libcudart.so.13", "cudaRuntimeGetVersion", true, 1000, 10},
	{"cublas_lt", "libcublasLt.so.13", "cublasLtGetVersion", false, 10000, 100},
	{"cudnn", cuDNN, "cudnnGetVersion", false, 10000, 100},
	{"nccl", "libnccl.so.2", "ncclGetVersion", true, 10000, 100},
}

// Versions are the versions of what runs programs on GPUs, for reports: of the plugin, of PJRT, and
// of libraries. What cannot be asked is not there.
func (e *Engine) Versions() map[string]string {
	major, minor := e.plugin.Version()
	list := map[string]string{"plugin": e.version, "pjrt": fmt.Sprintf("%d.%d", major, minor)}
	for _, v := range versions {
		n, err := pjrt.Version(cmp.Or(e.bundle.Library(v.soname), v.soname), v.function, v.stores)
		if err == nil {
			list[v.name] = fmt.Sprintf("%d.%d.%d", n/v.major, n%v.major/v.minor, n%v.minor)
		}
	}
	return list
}

// Flags are the flags of every program for this engine's GPUs, without folders, and variables that
// may change numbers.
func (e *Engine) Flags() map[string]string {
	list := map[string]string{}
	for name, value := range gpuFlags(e.Arch(), "", e.environ) {
		if name != "xla_gpu_cuda_data_dir" {
			list[name] = fmt.Sprint(value)
		}
	}
	maps.Copy(list, e.environ.Recorded())
	return list
}
