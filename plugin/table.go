package plugin

import (
	_ "embed" // for the table of wheels
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/deepwell/deepwell/internal/strictjson"
)

// An engine is one row of the table: what it is for, which wheels it comes from, and the digest
// of the files that must come out of them.
type engine struct {
	name    string
	version string // version of the package that holds the plugin
	purpose string // one sentence for people
	plugin  string // slash path of the PJRT plugin in the tree
	data    string // slash path of the CUDA data folder: bin/ptxas, nvvm/libdevice
	stub    string // slash path of the stand-in for libcuda, written where stubcuda can
	cudnn   string // version that cuDNN reports
	covers  string // another engine whose files these include
	wheels  []wheel
	trees   map[string]string // digest of the tree by host
}

// A wheel is one package of an engine: a row of wheels.json.
type wheel struct {
	Name, Version string
	Keep          []string       // path.Match patterns; each must match a file
	Pins          map[string]pin // by host
}

// A pin is a wheel's file for one host.
type pin struct {
	SHA256   string
	Bytes    int64 // size of the wheel
	Unpacked int64 // sum of the sizes of its entries: the most that unpacking may write
}

// Hosts that wheels are pinned for, as GOOS/GOARCH.
const (
	amd64 = "linux/amd64"
	arm64 = "linux/arm64"
)

// keepAlways are patterns that need not match: the licence travels with the files.
var keepAlways = []string{"*.dist-info/licenses/*", "*.dist-info/LICENSE*"}

// A catalogue is the table together with what it is read on. Tests have their own.
type catalogue struct {
	engines []engine
	host    string
	driver  func() bool // whether this host has a real NVIDIA driver
	now     func() time.Time
}

func builtin() *catalogue {
	return &catalogue{
		engines: engines(),
		host:    runtime.GOOS + "/" + runtime.GOARCH,
		driver:  hostHasDriver,
		now:     time.Now,
	}
}

// engines is the table. The CUDA packages have the versions that the package cuda-toolkit 13.4.3
// names, except cuBLAS: it names 13.8.0.4, and 13.8.2.12 is what cuDNN's plans were tried with.
// NCCL 2.30.7 exports every nccl function that the plugin names; no run speaks for that version.
// NVSHMEM is left out: the plugin holds the message "NVSHMEM is not supported in XLA".
func engines() []engine {
	return []engine{
		{
			name: "cpu", version: "0.0.1",
			purpose: "runs programs on the CPU, on as many virtual devices as asked for",
			plugin:  "xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so",
			wheels:  wheels()["cpu"],
			trees: map[string]string{
				amd64: "c062c6edbff3bb2fc793a16b5e60aea1035c1835d766a78d12cd700ba81ad305",
				arm64: "aaa39aa487769f8bbd023ce81efd1d6a56b604a0ecf0d8d331b4c08405cc0e87",
			},
		},
		{
			name: "cuda13", version: "0.12.0.1",
			purpose: "compiles programs for NVIDIA GPUs; needs neither a GPU nor a driver",
			plugin:  "jax_plugins/xla_cuda13/xla_cuda_plugin.so",
			data:    "nvidia/cu13",
			stub:    "stub/libcuda.so.1",
			cudnn:   "9.24.1",
			wheels:  wheels()["cuda13"],
			trees: map[string]string{
				amd64: "9effa18e453a17679d5ae6773ff5066c454c53367f4416269345fa00f70c8971",
				arm64: "ea2e9bd963447584a48ab62d0be74237a84687d31b6f4f362755392605d732e6",
			},
		},
		{
			name: "cuda13-run", version: "0.12.0.1",
			purpose: "compiles and runs programs on NVIDIA GPUs; includes cuda13",
			plugin:  "jax_plugins/xla_cuda13/xla_cuda_plugin.so",
			data:    "nvidia/cu13",
			stub:    "stub/libcuda.so.1",
			cudnn:   "9.24.1",
			covers:  "cuda13",
			wheels:  cudaRun(),
			trees: map[string]string{
				amd64: "c80d3ad75bf8e485c2ea177459c7da3fbf33519b94c9e43114498d96080ecef4",
				arm64: "d54e048813c6c582613a20c7455ba55db5694bf64353ddb3c68538320c54ce38",
			},
		},
	}
}

//go:embed wheels.json
var wheelsText []byte

// wheels are the packages of each engine, by its name; cuda13-run's are added to cuda13's,
// which are what a compile without a GPU loads (see the package comment).
var wheels = sync.OnceValue(func() (list map[string][]wheel) {
	_ = strictjson.Decode(wheelsText, &list) // it is part of the binary, and TestTable reads it
	return list
})

// cudaRun lists what a GPU host needs: what a compile does, all of cuDNN and cuBLAS, and the
// libraries that the plugin looks up when it runs.
func cudaRun() []wheel {
	all := slices.Clone(wheels()["cuda13"])
	for i, w := range all {
		switch w.Name {
		case "nvidia-cudnn-cu13":
			all[i].Keep = []string{"nvidia/cudnn/lib/libcudnn*.so.9"}
		case "nvidia-cublas":
			all[i].Keep = []string{"nvidia/cu13/lib/libcublas.so.13", "nvidia/cu13/lib/libcublasLt.so.13"}
		}
	}
	return append(all, wheels()["cuda13-run"]...)
}
