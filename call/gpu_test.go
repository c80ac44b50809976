package call

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/internal/softgpu"
)

// A peer is a process that owns memory of a software GPU, and a child of it (testdata/peer.c).
type peer struct {
	*caller
	in      io.WriteCloser
	out     *bufio.Reader
	log     *safeBuffer
	address map[int64]uint64 // of blocks
	handle  map[int64][]byte
}

// safeBuffer is what a process says while it runs.
type safeBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *safeBuffer) Write(data []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(data)
}

func (b *safeBuffer) said() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// startPeer compiles and starts the peer, with a child that runs on the software GPU.
func startPeer(t *testing.T, o softgpu.Options) *peer {
	t.Helper()
	g := softgpu.Build(t)
	program := filepath.Join(t.TempDir(), "peer")
	if out, err := exec.Command("cc", "-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror",
		"-I../internal/softgpu/c", "-o", program, "testdata/peer.c", filepath.Join(g.Lib, "libcuda.so.1"),
		"-Wl,-rpath,"+g.Lib).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &peer{caller: &caller{t: t, cmd: exec.Command(program, self, Verb, GPU)}, log: &safeBuffer{},
		address: map[int64]uint64{}, handle: map[int64][]byte{}}
	p.exchange, p.block = p.relay, p.export
	o.Share = true
	p.cmd.Env, p.cmd.Stderr = g.Env(o), p.log
	out, err := p.cmd.StdoutPipe()
	if err == nil {
		p.in, err = p.cmd.StdinPipe()
	}
	if err == nil {
		err = p.cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	p.out = bufio.NewReader(out)
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		if t.Failed() {
			t.Logf("the peer and its child say:\n%s", p.log.said())
		}
	})
	return p
}

// do has the peer do something, and gives the words of its answer.
func (p *peer) do(data []byte, format string, args ...any) []string {
	p.t.Helper()
	_, err := p.in.Write(append([]byte(fmt.Sprintf(format, args...)+"\n"), data...))
	line := ""
	if err == nil {
		line, err = p.out.ReadString('\n')
	}
	words := strings.Fields(line)
	if err != nil || len(words) == 0 || words[0] != "ok" {
		p.t.Fatalf("%s: %q, %v", format, line, err)
	}
	return words[1:]
}

// body reads the bytes that an answer announces.
func (p *peer) body(words []string) []byte {
	p.t.Helper()
	var n int
	if _, err := fmt.Sscan(words[0], &n); err != nil {
		p.t.Fatal(err)
	}
	data := make([]byte, n)
	if _, err := io.ReadFull(p.out, data); err != nil {
		p.t.Fatal(err)
	}
	return data
}

// relay is exchange by way of the peer, whose child it is.
func (p *peer) relay(body []byte, _ ...int) []byte {
	p.t.Helper()
	return p.body(p.do(body, "ask %d", len(body)))
}

// export is block by memory of the GPU.
func (p *peer) export(n, size int64) region {
	p.t.Helper()
	r := p.alloc(n, size)
	p.must(map[string]any{"do": "map", "block": n, "size": size, "handle": p.handle[n]})
	return r
}

// alloc allocates memory of the GPU that the child does not know yet.
func (p *peer) alloc(n, size int64) region {
	p.t.Helper()
	words := p.do(nil, "alloc %d", size)
	var at uint64
	if _, err := fmt.Sscan(words[0], &at); err != nil {
		p.t.Fatal(err)
	}
	handle, err := hex.DecodeString(words[1])
	if err != nil {
		p.t.Fatal(err)
	}
	p.address[n], p.handle[n] = at, handle
	return gpuRegion{p, at}
}

// gpuRegion is memory of the GPU.
type gpuRegion struct {
	*peer
	at uint64
}

func (r gpuRegion) write(at int64, data []byte) {
	r.t.Helper()
	r.do(data, "write %d %d", r.at+uint64(at), len(data))
}

func (r gpuRegion) read(at, size int64) []byte {
	r.t.Helper()
	return r.body(r.do(nil, "read %d %d", r.at+uint64(at), size))
}

// A child on a GPU computes with the memory of another process what PyTorch does on the CPU:
// parameters and inputs are read where they are, also after they have changed, outputs and gradients
// are written where they belong.
func TestChildImportsMemoryOfAGPU(t *testing.T) {
	for _, name := range []string{"nanogpt", "tied", "mixtral"} {
		t.Run(name, func(t *testing.T) {
			if name != "nanogpt" {
				slowtest.Only(t)
			}
			startPeer(t, softgpu.Options{Memory: 256 << 20, Delay: 1}).model(name).agree()
		})
	}
}

// What a peer gets wrong is an error that it can read, and the child goes on.
func TestWrongHandles(t *testing.T) {
	p := startPeer(t, softgpu.Options{Memory: 128 << 20})
	p.alloc(1, 4096)
	p.export(2, 4096)
	p.do(nil, "free %d", p.address[1])
	for name, r := range map[string]map[string]any{
		"freed":   {"handle": p.handle[1]},
		"short":   {"handle": p.handle[2][:63]},
		"garbage": {"handle": bytes.Repeat([]byte{'x'}, 64)},
		"none":    {},
		"large":   {"handle": p.handle[2], "size": 8192},
		"taken":   {"handle": p.handle[2], "block": 2},
	} {
		full := map[string]any{"do": "map", "block": 7, "size": 4096}
		maps.Copy(full, r)
		if _, err := p.ask(full); err == nil || err.Code != diag.BadInput {
			t.Errorf("%s: %v", name, err)
		}
	}
	// The same memory may be two blocks.
	p.must(map[string]any{"do": "map", "block": 3, "size": 4096, "handle": p.handle[2]})
	p.must(map[string]any{"do": "hello", "unmap": []int64{2, 3}})
	p.do(nil, "free %d", p.address[2])
}

// A child opens memory of the GPU that it sees, by whatever number the peer knows it, and of no other.
func TestChildSeesItsOwnGPU(t *testing.T) {
	for sees, code := range map[string]diag.Code{"0": "", "1": diag.BadInput} {
		p := startPeer(t, softgpu.Options{GPUs: 2, Memory: 128 << 20,
			Env: []string{"PEER_CHILD_SEES=" + sees}})
		p.alloc(1, 4096)
		_, err := p.ask(map[string]any{"do": "map", "block": 1, "size": 4096, "handle": p.handle[1]})
		if code == "" && err != nil || code != "" && (err == nil || err.Code != code) {
			t.Errorf("a child that sees GPU %s: %v", sees, err)
		}
	}
}

// A GPU that fails is an error with its code, of the call that had it and of all after it.
func TestFailedGPUEndsCalls(t *testing.T) {
	p := startPeer(t, softgpu.Options{Memory: 256 << 20,
		Fail: softgpu.Failure{Launch: 3, Result: 719}})
	m := p.model("nanogpt")
	for range 2 {
		_, err := m.ask(map[string]any{"do": "forward", "variant": m.d.Variant, "outs": m.where,
			"args": []place{{2, 0}, {2, 1024}}})
		if err == nil || err.Code != diag.DeviceFailed {
			t.Errorf("a call on a failed GPU: %v", err)
		}
	}
	p.alloc(9, 4096)
	_, err := p.ask(map[string]any{"do": "map", "block": 9, "size": 4096, "handle": p.handle[9]})
	if err == nil || err.Code != diag.DeviceFailed {
		t.Errorf("memory of a failed GPU: %v", err)
	}
}

// Memory that the child was asked to give back is its owner's when it has answered: the owner frees
// it, and goes on with other memory.
func TestUnmappedMemoryIsFree(t *testing.T) {
	p := startPeer(t, softgpu.Options{Memory: 256 << 20, Delay: 2})
	m := p.model("nanogpt")
	call, before := m.forward()
	old := m.outs.read(0, 1<<16)
	if _, err := m.backward(call); err != nil {
		t.Fatal(err.Format())
	}
	p.must(map[string]any{"do": "hello", "free": []int64{call}, "unmap": []int64{3, 4}})
	p.do(nil, "free %d", p.address[3])
	p.do(nil, "free %d", p.address[4])
	m.outs = p.export(8, 1<<16)
	for i := range m.where {
		m.where[i][0] = 8
	}
	if _, again := m.forward(); !(math.Abs(again-before) <= 1e-6) {
		t.Errorf("in other memory the loss is %v, not %v", again, before)
	}
	if have := m.outs.read(0, 1<<15); !bytes.Equal(have[:1024], old[:1024]) {
		t.Error("in other memory the first output is another")
	}
}

// A child does not outlive the process whose memory it works on.
func TestChildEndsWithItsPeer(t *testing.T) {
	p := startPeer(t, softgpu.Options{Memory: 128 << 20})
	p.export(1, 4096)
	var child int
	_, said, _ := strings.Cut(p.log.said(), "peer: child ")
	if _, err := fmt.Sscan(said, &child); err != nil {
		t.Fatal(err)
	}
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); {
		if !runs(child) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("process %d outlives its peer", child)
}

// runs says whether there is a process that is no zombie.
func runs(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(text), ") Z ")
}

// The Python package trains a module whose tensors are in memory of the software GPU, as far as it
// can with a torch that has no CUDA. DEEPWELL_TORCH is a Python with torch, which CI gives.
func TestPythonOnASoftwareGPU(t *testing.T) {
	python := os.Getenv("DEEPWELL_TORCH")
	if python == "" {
		t.Skip("DEEPWELL_TORCH names no Python with torch")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	packages, err := filepath.Abs("../python")
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(t.TempDir(), "deepwell") // a name that the package knows
	if err := os.Symlink(self, program); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), python, "-W", "ignore", "-m", "unittest", "-v", "test_gpu")
	cmd.Dir = filepath.Join(packages, "tests")
	g := softgpu.Build(t)
	cmd.Env = g.Env(softgpu.Options{Memory: 512 << 20, Share: true, Delay: 1,
		Env: []string{"PYTHONPATH=" + packages, "DEEPWELL_BINARY=" + program}})
	// torch has CUDA's own libraries, so the software GPU's are for the child alone.
	for i, one := range cmd.Env {
		if strings.HasPrefix(one, "LD_") {
			cmd.Env[i] = "SOFTGPU_" + one
		}
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	t.Logf("%s", out)
}
