package plugin

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/stubcuda"
)

// A Bundle is an installed and verified engine: what to load, and in which order. All paths are
// absolute.
type Bundle struct {
	Name    string // the engine that was found; "cuda13-run" may stand for "cuda13"
	Version string // of the plugin's package
	Digest  string // SHA-256 of the tree, as pinned in this binary
	Plugin  string // the PJRT plugin

	// Preload lists libraries to load before the plugin, in this order, with RTLD_NOW and
	// RTLD_GLOBAL, so that a later lookup by name finds them. It begins with Stub, if there is one.
	Preload []string

	DataDir string // value of xla_gpu_cuda_data_dir: holds bin/ptxas and nvvm/libdevice; or ""
	CuDNN   string // version of cuDNN, for dnn_version of a target: "9.24.1"; or ""

	// Stub is the stand-in for libcuda.so.1 that lets cuDNN plan without a driver. It is "" where a
	// real driver exists, and where no stand-in can be written (linux/arm64).
	Stub string

	// Driver says that this host has a real NVIDIA driver; always false for an engine without CUDA.
	// With neither Stub nor Driver, cuDNN finds no plan and a compile that asks it for one fails:
	// leave xla_gpu_cudnn_deviceless_compilation_mode alone then.
	Driver bool

	dir   string // of the engine
	seals []seal // of the files and folders, as Open found them
}

// Open finds an installed engine in dir and verifies its files: it hashes those that were changed
// since they were hashed last, as the kernel tells. The error is DW2002 if the engine is not
// installed, DW2012 if its files are not the pinned ones, and DW2013 if others could change them.
// Ask Bundle.Loaded when the libraries are loaded.
func Open(ctx context.Context, dir, name string) (*Bundle, error) {
	return builtin().open(ctx, dir, name, false)
}

// Verify is Open, but hashes every file: it finds what a disk has lost as well.
func Verify(ctx context.Context, dir, name string) (*Bundle, error) {
	return builtin().open(ctx, dir, name, true)
}

func (c *catalogue) open(ctx context.Context, dir, name string, all bool) (*Bundle, error) {
	e, err := c.find(name)
	if err != nil {
		return nil, err
	}
	dir, err = filepath.Abs(dir)
	if err != nil {
		return nil, diag.New(diag.FileError, "cannot find the folder %s", dir).Wrap(err)
	}
	seals, err := c.verify(ctx, filepath.Join(dir, e.name), e, all)
	if err == nil {
		return c.bundle(dir, e, seals), nil
	}
	if errors.Is(err, diag.EngineMissing) {
		for i, other := range c.engines {
			if other.covers != name {
				continue
			}
			seals, err := c.verify(ctx, filepath.Join(dir, other.name), &c.engines[i], all)
			if err == nil {
				return c.bundle(dir, &c.engines[i], seals), nil
			}
		}
	}
	return nil, err
}

// bundle describes the engine in dir, which is there and verified.
func (c *catalogue) bundle(dir string, e *engine, seals []seal) *Bundle {
	at := func(slashed string) string {
		if slashed == "" {
			return ""
		}
		return filepath.Join(dir, e.name, filepath.FromSlash(slashed))
	}
	b := &Bundle{dir: filepath.Join(dir, e.name), Name: e.name, Version: e.version,
		Digest: e.trees[c.host], Plugin: at(e.plugin),
		DataDir: at(e.data), CuDNN: e.cudnn,
		seals: seals}
	b.Driver = e.cudnn != "" && c.driver()
	if len(c.generated(e)) > 0 && !b.Driver {
		b.Stub = at(e.stub)
		b.Preload = []string{b.Stub}
	}
	return b
}

// Library is the path of one of the engine's libraries by its name, such as libnccl.so.2; "" if the
// engine has none of that name.
func (b *Bundle) Library(soname string) string {
	for _, dir := range []string{"nvidia/cu13/lib", "nvidia/cudnn/lib", "nvidia/nccl/lib"} {
		path := filepath.Join(b.dir, filepath.FromSlash(dir), soname)
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	return ""
}

// generated gives the files of an engine that come out of no wheel, by slash path.
func (c *catalogue) generated(e *engine) map[string][]byte {
	if e.stub == "" || c.host != amd64 {
		return nil
	}
	return map[string][]byte{e.stub: stubcuda.Build()}
}

// hostHasDriver looks for a real NVIDIA driver on this host.
func hostHasDriver() bool { return hasDriver("/", os.Getenv("LD_LIBRARY_PATH")) }

// driverSigns are files that only a real driver brings: its device node (also under WSL), its
// report, and its library where distributions and containers put it.
var driverSigns = []string{
	"dev/nvidiactl", "dev/dxg", "proc/driver/nvidia/version",
	"usr/lib/x86_64-linux-gnu/libcuda.so.1", "usr/lib/aarch64-linux-gnu/libcuda.so.1",
	"usr/lib64/libcuda.so.1", "usr/lib/libcuda.so.1", "lib64/libcuda.so.1", "lib/libcuda.so.1",
	"usr/lib64/nvidia/libcuda.so.1", "usr/lib/wsl/lib/libcuda.so.1",
	"usr/local/nvidia/lib64/libcuda.so.1", "usr/local/lib/libcuda.so.1",
	"run/opengl-driver/lib/libcuda.so.1",
}

// hasDriver looks below root, in the search path for libraries, and in the cache of ld.so, whose
// entries end in a zero byte.
func hasDriver(root, libraryPath string) bool {
	for _, sign := range driverSigns {
		if _, err := os.Stat(filepath.Join(root, sign)); err == nil {
			return true
		}
	}
	for _, dir := range filepath.SplitList(libraryPath) {
		if _, err := os.Stat(filepath.Join(dir, stubcuda.SONAME)); dir != "" && err == nil {
			return true
		}
	}
	cache, err := os.ReadFile(filepath.Join(root, "etc/ld.so.cache"))
	return err == nil && strings.Contains(string(cache), "/"+stubcuda.SONAME+"\x00")
}
