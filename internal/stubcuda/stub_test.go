package stubcuda_test

import (
	"bytes"
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/deepwell/deepwell/internal/stubcuda"
	"github.com/ebitengine/purego"
)

// TestELF reads the library back as the tools do.
func TestELF(t *testing.T) {
	f, err := elf.NewFile(bytes.NewReader(stubcuda.Build()))
	if err != nil {
		t.Fatal(err)
	}
	if f.Type != elf.ET_DYN || f.Machine != elf.EM_X86_64 {
		t.Errorf("file is %v for %v", f.Type, f.Machine)
	}
	soname, err := f.DynString(elf.DT_SONAME)
	if err != nil || !slices.Equal(soname, []string{stubcuda.SONAME}) {
		t.Errorf("soname %q, %v", soname, err)
	}
	stack := false
	var end uint64
	for _, p := range f.Progs {
		if p.Flags&elf.PF_W != 0 && p.Flags&elf.PF_X != 0 {
			t.Errorf("segment %v is writable and executable", p.Type)
		}
		stack = stack || p.Type == elf.PT_GNU_STACK
		if p.Type == elf.PT_LOAD {
			if p.Vaddr/0x1000 < (end+0xfff)/0x1000 {
				t.Errorf("segment at %#x shares a page with the one before", p.Vaddr)
			}
			end = p.Vaddr + p.Memsz
		}
	}
	if !stack {
		t.Error("no PT_GNU_STACK: the stack would become executable")
	}
	syms, err := f.DynamicSymbols()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	text := f.Section(".text")
	for _, s := range syms {
		names = append(names, s.Name)
		if s.Value < text.Addr || s.Value >= text.Addr+text.Size {
			t.Errorf("%s is outside the code", s.Name)
		}
	}
	if !slices.Equal(names, stubcuda.Names()) {
		t.Errorf("%d symbols for %d names", len(names), len(stubcuda.Names()))
	}
}

// special lists the functions with a duty.
func special() []string {
	return []string{"cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuGetErrorName",
		"cuGetErrorString", "cuGetProcAddress", "cuGetProcAddress_v2"}
}

// TestNames holds the list sorted and free of doubles, and the functions with a duty in it.
func TestNames(t *testing.T) {
	names := stubcuda.Names()
	if !slices.IsSorted(names) || len(slices.Compact(slices.Clone(names))) != len(names) {
		t.Error("names.txt is not sorted, or holds a name twice")
	}
	for _, want := range append(special(), "cuMemAlloc_v2", "cuLaunchKernel") {
		if !slices.Contains(names, want) {
			t.Errorf("no %s", want)
		}
	}
}

// digest is the SHA-256 of the library. The tree of engine cuda13 holds it too: if this changes,
// the engine's pin in package plugin changes with it.
const digest = "b21d248a4e71d8107c1f49ec7dc87bec54eee96517fc1484efb203a8857d97ae"

func TestSameBytes(t *testing.T) {
	sum := sha256.Sum256(stubcuda.Build())
	if got := hex.EncodeToString(sum[:]); got != digest {
		t.Errorf("SHA-256 %s, want %s", got, digest)
	}
}

func TestReadelf(t *testing.T) {
	tool, err := exec.LookPath("readelf")
	if err != nil {
		t.Skip("no readelf here")
	}
	out, err := exec.CommandContext(t.Context(), tool, "-a", "-W", write(t)).CombinedOutput()
	if err != nil || bytes.Contains(out, []byte("readelf: ")) {
		t.Errorf("readelf: %v\n%.2000s", err, out)
	}
}

// TestCall loads the library and calls it.
func TestCall(t *testing.T) {
	if runtime.GOOS != "linux" || runtime.GOARCH != "amd64" {
		t.Skip("the library is for linux/amd64")
	}
	lib, err := purego.Dlopen(write(t), purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = purego.Dlclose(lib) })
	symbol := func(name string) uintptr {
		p, err := purego.Dlsym(lib, name)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	call := func(name string, args ...uintptr) int32 {
		r, _, _ := purego.SyscallN(symbol(name), args...)
		return int32(r)
	}
	address := func(p *int32) uintptr { return uintptr(unsafe.Pointer(p)) }

	version, count := int32(-1), int32(-1)
	for _, row := range []struct {
		name string
		args []uintptr
		want int32
	}{
		{"cuInit", []uintptr{0}, 0},
		{"cuDriverGetVersion", []uintptr{address(&version)}, 0},
		{"cuDriverGetVersion", []uintptr{0}, 1},
		{"cuDeviceGetCount", []uintptr{address(&count)}, 0},
		{"cuDeviceGetCount", []uintptr{0}, 1},
		{"cuDeviceGet", []uintptr{0, 0}, 100},
		{"cuGetErrorName", []uintptr{100, 0}, 1},
		{"cuGetProcAddress_v2", []uintptr{0, 0, 0, 0, 0}, 1},
	} {
		if got := call(row.name, row.args...); got != row.want {
			t.Errorf("%s(%x) = %d, want %d", row.name, row.args, got, row.want)
		}
	}
	if version != 13040 || count != 0 {
		t.Errorf("version %d, count %d", version, count)
	}
	for name, want := range map[string]string{
		"cuGetErrorName": "CUDA_ERROR_NO_DEVICE", "cuGetErrorString": "stand-in",
	} {
		var text *byte
		if got := call(name, 100, uintptr(unsafe.Pointer(&text))); got != 0 {
			t.Errorf("%s = %d", name, got)
		} else if s := cString(text); !strings.Contains(s, want) {
			t.Errorf("%s gives %q", name, s)
		}
	}
	for _, name := range stubcuda.Names() {
		if slices.Contains(special(), name) {
			continue
		}
		if got := call(name); got != 100 {
			t.Errorf("%s() = %d, want 100", name, got)
		}
	}
	testProcAddress(t, symbol)
}

// testProcAddress asks for every name, a few unknown ones, and the two cases of status.
func testProcAddress(t *testing.T, symbol func(string) uintptr) {
	four, five := symbol("cuGetProcAddress"), symbol("cuGetProcAddress_v2")
	ask := func(f uintptr, name string, version uintptr) (at uintptr, status int32, result int32) {
		text := append([]byte(name), 0)
		at, status = 1, -1
		r, _, _ := purego.SyscallN(f, uintptr(unsafe.Pointer(&text[0])), uintptr(unsafe.Pointer(&at)),
			version, 0, uintptr(unsafe.Pointer(&status)))
		runtime.KeepAlive(text)
		return at, status, int32(r)
	}
	for _, name := range stubcuda.Names() {
		at, status, result := ask(five, name, 11000)
		if at != symbol(name) || status != 0 || result != 0 {
			t.Errorf("%s: at %#x, status %d, result %d", name, at, status, result)
		}
	}
	for _, name := range []string{"", "cu", "cuInit2", "cuIni", "cudaMalloc"} {
		if at, status, result := ask(five, name, 13000); at != 0 || status != 1 || result != 500 {
			t.Errorf("%q: at %#x, status %d, result %d", name, at, status, result)
		}
		if at, status, result := ask(four, name, 13000); at != 0 || status != -1 || result != 500 {
			t.Errorf("%q by four arguments: at %#x, status %d, result %d", name, at, status, result)
		}
	}
	if at, _, _ := ask(four, "cuGetProcAddress", 11080); at != four {
		t.Error("before CUDA 12 the name cuGetProcAddress means the function with four arguments")
	}
	if at, _, _ := ask(four, "cuGetProcAddress", 12000); at != five {
		t.Error("from CUDA 12 on the name cuGetProcAddress means the function with five arguments")
	}
}

func write(t *testing.T) string {
	path := filepath.Join(t.TempDir(), stubcuda.SONAME)
	if err := os.WriteFile(path, stubcuda.Build(), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func cString(p *byte) string {
	n := 0
	for *(*byte)(unsafe.Add(unsafe.Pointer(p), n)) != 0 {
		n++
	}
	return unsafe.String(p, n)
}
