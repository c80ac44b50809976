package softgpu

import (
	"bytes"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/deepwell/deepwell/internal/parallel"
	"github.com/deepwell/deepwell/internal/stubcuda"
	"github.com/deepwell/deepwell/plugin"
)

// Unplayed is the exit status of a process that asked for something the software GPU does not play;
// its standard error says what.
const Unplayed = 86

//go:embed c/*.c c/*.h names/*.txt
var files embed.FS

// A library is one of the shared libraries. Its sources are the C files whose names begin with one
// of the prefixes; the rest of its names get stubs.
type library struct {
	soname   string
	prefixes []string
	names    string // file of names in the folder names; "" is the driver's list
	refuse   string // its name in refused.txt
	uses     []string
}

var libraries = []library{
	{"libcuda.so.1", []string{"driver", "ptx", "common"}, "", "driver", nil},
	{"libnvidia-ml.so.1", []string{"nvml", "common"}, "nvml", "nvml", nil},
	{"libcudart.so.13", []string{"cudart", "common"}, "cudart", "cudart", []string{"libcuda.so.1"}},
	{"libcublas.so.13", []string{"cublas", "common"}, "cublas", "cublas",
		[]string{"libcuda.so.1"}},
	{"libcublasLt.so.13", []string{"cublas", "common"}, "cublas", "cublas",
		[]string{"libcuda.so.1"}},
	{"libnccl.so.2", []string{"nccl", "common"}, "nccl", "nccl", []string{"libcuda.so.1"}},
}

// The compiler's and the linker's flags. Multiplications and additions must not be fused where the
// PTX does not say so, and hold in every rounding mode; loops over the lanes of a warp become
// vector instructions of this host's processor.
var (
	flags = []string{"-std=c11", "-march=native", "-g", "-Wall", "-Wextra",
		"-Wno-missing-field-initializers", "-fPIC", "-pthread", "-fvisibility=hidden",
		"-ffp-contract=off", "-frounding-math", "-fno-math-errno", "-fno-trapping-math",
		"-fno-strict-aliasing"}
	linkFlags = []string{"-shared", "-pthread", "-Wl,-Bsymbolic", "-Wl,-rpath,$ORIGIN"}
)

// level is how much the compiler optimizes a source. The interpreter's loops over lanes become
// vectors with -O3 only. The product of cuBLAS is written in vectors: with -O3 it is not faster,
// and takes 19 s to compile instead of 1.
func level(source string) string {
	if strings.HasPrefix(filepath.Base(source), "ptx") {
		return "-O3"
	}
	return "-O2"
}

// A GPU is a built software GPU.
type GPU struct {
	// Lib is the folder of the libraries. Toolkit has ptxas and libdevice, and is the value of
	// xla_gpu_cuda_data_dir.
	Lib, Toolkit string
}

var built = struct {
	sync.Mutex
	gpu *GPU
}{}

// Build compiles the libraries, or finds them in the user's cache. It skips the test where there is
// no C compiler, and on processors that the real libraries are not used on here.
func Build(tb testing.TB) *GPU {
	tb.Helper()
	cc, err := exec.LookPath("cc")
	if err != nil || runtime.GOOS != "linux" || runtime.GOARCH != "amd64" {
		tb.Skip("the software GPU needs a C compiler, and Linux on x86-64")
	}
	built.Lock()
	defer built.Unlock()
	if built.gpu == nil {
		gpu, err := build(context.Background(), cc)
		if err != nil {
			tb.Fatal(err)
		}
		built.gpu = gpu
	}
	return built.gpu
}

// build makes the folder of this state of the sources unless it is there. Two processes may do so
// at the same time: each builds in a folder of its own, and the first to finish wins.
func build(ctx context.Context, cc string) (*GPU, error) {
	engines, err := plugin.DefaultDir(os.Getenv)
	if err != nil {
		return nil, err
	}
	bundle, err := plugin.Open(ctx, engines, "cuda13")
	if err != nil {
		return nil, fmt.Errorf("the software GPU needs the CUDA engine"+
			" (deepwell engine install cuda13): %w", err)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return nil, err
	}
	key, err := digest(cc, bundle.DataDir)
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(cache, "deepwell-test", "softgpu", key)
	gpu := &GPU{Lib: filepath.Join(dir, "lib"), Toolkit: filepath.Join(dir, "toolkit")}
	if _, err := os.Stat(dir); err == nil {
		return gpu, nil
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return nil, err
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), "build")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	if err := compileAll(ctx, cc, tmp); err != nil {
		return nil, err
	}
	if err := writeToolkit(filepath.Join(tmp, "toolkit"), bundle.DataDir); err != nil {
		return nil, err
	}
	if err := os.Rename(tmp, dir); err != nil {
		if _, there := os.Stat(dir); there != nil {
			return nil, err
		}
	}
	return gpu, nil
}

// digest names a state of the sources and of what they are built with.
func digest(cc, dataDir string) (string, error) {
	version, err := exec.Command(cc, "--version").Output()
	if err != nil {
		return "", err
	}
	processor, err := exec.Command(cc, "-march=native", "-dM", "-E", "-xc", os.DevNull).Output()
	if err != nil {
		return "", err
	}
	h := sha256.New()
	h.Write(processor)
	fmt.Fprintf(h, "%q %q %q %q %q %v\n", version, dataDir, flags, linkFlags, ptxasScript, libraries)
	fmt.Fprintln(h, level("ptx.c"), level("driver.c"))
	fmt.Fprintln(h, stubcuda.Names())
	err = fs.WalkDir(files, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := files.ReadFile(path)
		fmt.Fprintf(h, "%q %q\n", path, text)
		return err
	})
	return hex.EncodeToString(h.Sum(nil))[:24], err
}

// compileAll writes the sources and the stubs into dir/src, compiles each once, and links the
// libraries into dir/lib. The driver comes first: the others are linked with it.
func compileAll(ctx context.Context, cc, dir string) error {
	src, lib := filepath.Join(dir, "src"), filepath.Join(dir, "lib")
	for _, d := range []string{src, lib} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return err
		}
	}
	if err := writeSources(src); err != nil {
		return err
	}
	sources, err := filepath.Glob(filepath.Join(src, "*.c"))
	if err != nil {
		return err
	}
	err = parallel.Each(runtime.NumCPU(), len(sources), func() func(int) error {
		return func(i int) error {
			source := sources[i]
			args := append(slices.Clone(flags), level(source), "-c", "-o", object(source), source)
			return run(ctx, cc, args...)
		}
	})
	if err != nil {
		return err
	}
	for _, l := range libraries {
		if err := l.link(ctx, cc, src, lib); err != nil {
			return err
		}
	}
	return nil
}

func writeSources(src string) error {
	sources, err := fs.Glob(files, "c/*")
	if err != nil {
		return err
	}
	for _, path := range sources {
		text, err := files.ReadFile(path)
		if err == nil {
			err = os.WriteFile(filepath.Join(src, filepath.Base(path)), text, 0o644)
		}
		if err != nil {
			return err
		}
	}
	for _, l := range libraries {
		text, err := l.stubs()
		if err == nil {
			err = os.WriteFile(l.stubFile(src), text, 0o644)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// object is the object file of a source.
func object(source string) string { return strings.TrimSuffix(source, ".c") + ".o" }

// run runs the compiler; its error has what the compiler says.
func run(ctx context.Context, cc string, args ...string) error {
	if out, err := exec.CommandContext(ctx, cc, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("cc %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}

// stubFile is the source of a library's stubs; no prefix of sources matches it.
func (l library) stubFile(src string) string {
	return filepath.Join(src, "stubs_"+strings.ReplaceAll(l.soname, ".", "_")+".c")
}

func (l library) link(ctx context.Context, cc, src, lib string) error {
	args := append(slices.Clone(linkFlags), "-Wl,-soname,"+l.soname, "-o",
		filepath.Join(lib, l.soname), object(l.stubFile(src)))
	for _, prefix := range l.prefixes {
		found, err := filepath.Glob(filepath.Join(src, prefix+"*.o"))
		if err != nil {
			return err
		}
		args = append(args, found...)
	}
	for _, used := range l.uses {
		args = append(args, filepath.Join(lib, used))
	}
	return run(ctx, cc, append(args, "-lm", "-ldl")...)
}

// stubs writes a weak function for every name of the library. It gives way to the one that the
// sources define; if they define none, it ends the process, or says "not supported" if it is
// listed.
func (l library) stubs() ([]byte, error) {
	names := stubcuda.Names()
	if l.names != "" {
		text, err := files.ReadFile("names/" + l.names + ".txt")
		if err != nil {
			return nil, err
		}
		names = strings.Fields(string(text))
	}
	refused, err := refusals(l.refuse)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	out.WriteString("#include \"common.h\"\n" +
		"#define STUB __attribute__((weak, visibility(\"default\")))\n")
	for _, name := range names {
		body := fmt.Sprintf("sg_unplayed(%q, %q);", l.soname, name)
		if code, ok := refused[name]; ok {
			body = "return " + code + ";"
		}
		fmt.Fprintf(&out, "STUB int %s(void) { %s }\n", name, body)
	}
	return out.Bytes(), nil
}

// refusals reads the functions of a library that may say "not supported", and with which result.
func refusals(library string) (map[string]string, error) {
	text, err := files.ReadFile("names/refused.txt")
	if err != nil {
		return nil, err
	}
	list := map[string]string{}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) > 3 && f[0] == library {
			list[f[1]] = f[2]
		}
	}
	return list, nil
}
