package call

import (
	"compress/gzip"
	"context"
	"encoding/binary"
	"encoding/json"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/deepwell/deepwell/capture/pt2"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/safetensors"
)

// TestMain is the child, too.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == Verb {
		os.Exit(Main(openCPU))
	}
	os.Exit(m.Run())
}

func openCPU(ctx context.Context) (*engine.Engine, error) {
	return engine.Open(ctx, "cpu", engine.Options{Cache: enginetest.Cache()})
}

// A caller is the other end of a child's socket.
type caller struct {
	t      *testing.T
	fd     int
	n      int64
	blocks blocks
	cmd    *exec.Cmd
}

func start(t *testing.T) *caller {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "socket")
	defer func() { _ = theirs.Close() }()
	c := &caller{t: t, fd: pair[0], blocks: blocks{}, cmd: exec.Command("/proc/self/exe", Verb)}
	c.cmd.Stdin, c.cmd.Stderr = theirs, os.Stderr
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.cmd.Process.Kill() })
	return c
}

// ask sends a request and gives the answer; what is no error fails the test unless it is wanted.
func (c *caller) ask(r map[string]any, fds ...int) (*answer, *diag.Error) {
	c.t.Helper()
	c.n++
	r["n"] = c.n
	body, err := json.Marshal(r)
	if err != nil {
		c.t.Fatal(err)
	}
	body = append(binary.LittleEndian.AppendUint32(nil, uint32(len(body))), body...)
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	if err := unix.Sendmsg(c.fd, body, rights, nil, 0); err != nil {
		c.t.Fatal(err)
	}
	file := os.NewFile(uintptr(dup(c.t, c.fd)), "socket")
	defer func() { _ = file.Close() }()
	var size uint32
	if err := binary.Read(file, binary.LittleEndian, &size); err != nil {
		c.t.Fatal(err)
	}
	data := make([]byte, size)
	if _, err := io.ReadFull(file, data); err != nil {
		c.t.Fatal(err)
	}
	a := &answer{}
	if err := json.Unmarshal(data, a); err != nil {
		c.t.Fatal(err)
	}
	if a.N != c.n {
		c.t.Fatalf("request %d has the answer of %d", c.n, a.N)
	}
	return a, a.Error
}

func dup(t *testing.T, fd int) int {
	t.Helper()
	n, err := unix.Dup(fd)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func (c *caller) must(r map[string]any, fds ...int) *answer {
	c.t.Helper()
	a, err := c.ask(r, fds...)
	if err != nil {
		c.t.Fatal(err.Format())
	}
	return a
}

// block makes shared memory that both have mapped.
func (c *caller) block(n, size int64) []byte {
	c.t.Helper()
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	if err == nil {
		err = unix.Ftruncate(fd, size)
	}
	if err == nil {
		c.must(map[string]any{"do": "map", "block": n, "size": size}, fd)
		err = c.blocks.add(n, fd, size)
	}
	if err != nil {
		c.t.Fatal(err)
	}
	return c.blocks[n]
}

func unpack(t *testing.T, name string) []byte {
	t.Helper()
	f, err := os.Open("../capture/pt2/testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	data, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// A child computes what PyTorch does: outputs, and gradients of every parameter where they are
// asked for, twice. Parameters are read where they are, also after they have changed.
func TestChildAgreesWithPyTorch(t *testing.T) {
	for _, name := range []string{"nanogpt", "tied", "mixtral"} {
		t.Run(name, func(t *testing.T) { agree(t, name) })
	}
}

func agree(t *testing.T, name string) {
	path := filepath.Join(t.TempDir(), "m.pt2")
	if err := os.WriteFile(path, unpack(t, name+".pt2.gz"), 0o600); err != nil {
		t.Fatal(err)
	}
	want, err := safetensors.Parse(name, unpack(t, name+".safetensors.gz"))
	if err != nil {
		t.Fatal(err)
	}
	c := start(t)
	program := c.must(map[string]any{"do": "open", "path": path}).Program
	d := c.must(map[string]any{"do": "compile", "program": program, "wish": wish{Grad: true,
		Sizes: [][]int64{{2, 6}, {2, 6}}}}).Compiled
	// Parameters as the archive has them, then inputs, outputs and gradients, each in one block.
	params, places := c.block(1, 1<<20), map[string]place{}
	s := reader(t, path)
	at := int64(0)
	for _, p := range d.Params {
		each := p.Bytes / int64(len(p.Tensors))
		for i, tensor := range p.Tensors {
			places[tensor] = place{1, at + int64(i)*each}
			copy(params[at+int64(i)*each:], s(tensor))
		}
		at += (p.Bytes + alignment - 1) / alignment * alignment
	}
	c.must(map[string]any{"do": "bind", "program": program, "places": places})
	inputs, outs, grads := c.block(2, 4096), c.block(3, 1<<16), c.block(4, 1<<20)
	for i, input := range []string{"input_ids", "labels"} {
		for k, x := range floats(t, want, input) {
			binary.LittleEndian.PutUint32(inputs[i*1024+4*k:], uint32(int32(x)))
		}
	}
	var where []place
	loss := -1
	for i, r := range d.Results {
		if where = append(where, place{3, int64(i) << 15}); len(r.Dims) == 0 {
			loss = i
		}
	}
	forward := func() int64 {
		c.must(map[string]any{"do": "forward", "variant": d.Variant, "outs": where,
			"args": []place{{2, 0}, {2, 1024}}})
		return c.n
	}
	first := forward()
	single := func(b []byte) float64 {
		return float64(math.Float32frombits(binary.LittleEndian.Uint32(b)))
	}
	have, eager := single(outs[int64(loss)<<15:]), floats(t, want, "loss")[0]
	if math.Abs(have-eager) > 1e-5*eager {
		t.Errorf("the loss is %v, and PyTorch's %v", have, eager)
	}
	binary.LittleEndian.PutUint32(inputs[2048:], math.Float32bits(1))
	seeds := []place{}
	for i := range d.Results {
		seeds = append(seeds, place{-1, 0})
		if i == loss {
			seeds[i] = place{2, 2048}
		}
	}
	var room []place
	at = 0
	for _, g := range d.Grads {
		room = append(room, place{4, at})
		at += (g.Bytes + alignment - 1) / alignment * alignment
	}
	for range 2 {
		clear(grads)
		c.must(map[string]any{"do": "backward", "call": first, "seeds": seeds, "outs": room})
		for i, g := range d.Grads {
			each := int(g.Bytes) / len(g.Tensors)
			for k, tensor := range g.Tensors {
				compare(t, tensor, grads[int(room[i][1])+k*each:], floats(t, want, "grad."+tensor))
			}
		}
	}
	clear(params) // every logit is the same
	second := forward()
	if have := single(outs[int64(loss)<<15:]); math.Abs(have-math.Log(40)) > 1e-5 {
		t.Errorf("with parameters of 0 the loss is %v", have)
	}
	a := c.must(map[string]any{"do": "hello", "free": []int64{first, second}})
	if a.Live != 0 {
		t.Errorf("%d calls are kept", a.Live)
	}
	_, gone := c.ask(map[string]any{"do": "backward", "call": first, "seeds": seeds, "outs": room})
	if gone == nil || gone.Code != diag.BufferGone {
		t.Errorf("the gradient of a freed call: %v", gone)
	}
	c.must(map[string]any{"do": "close", "program": program})
}

// compare compares a gradient by its norm, or a thousandth of 1 where it is nearly 0.
func compare(t *testing.T, name string, have []byte, want []float64) {
	t.Helper()
	diff, norm := 0.0, 0.0
	for i, w := range want {
		h := float64(math.Float32frombits(binary.LittleEndian.Uint32(have[4*i:])))
		diff, norm = diff+(h-w)*(h-w), norm+w*w
	}
	if math.Sqrt(diff) > 1e-4*math.Max(math.Sqrt(norm), 1e-3) {
		t.Errorf("the gradient of %s is off by %v of %v", name, math.Sqrt(diff), math.Sqrt(norm))
	}
}

func floats(t *testing.T, set *safetensors.Set, name string) []float64 {
	t.Helper()
	x, err := set.Tensor(name)
	if err != nil {
		t.Fatal(err)
	}
	data, err := x.Bytes()
	if err != nil {
		t.Fatal(err)
	}
	shape, err := set.Shape(name)
	if err != nil {
		t.Fatal(err)
	}
	if shape.Type == dtype.S64 {
		var list []float64
		for i := range len(data) / 8 {
			list = append(list, float64(int64(binary.LittleEndian.Uint64(data[8*i:]))))
		}
		return list
	}
	return shape.Type.Values(data)
}

// What a caller gets wrong is an error that it can read, and the child goes on.
func TestWrongRequests(t *testing.T) {
	c := start(t)
	c.block(1, 4096)
	for want, r := range map[string]map[string]any{
		"no request":    {"do": "dance"},
		"no variant":    {"do": "forward", "variant": 3},
		"was freed":     {"do": "backward", "call": 3},
		"or of no size": {"do": "map", "block": 1, "size": 4096},
		"cannot read":   {"do": "open", "path": "/nonexistent.pt2"},
	} {
		if _, err := c.ask(r); err == nil || !strings.Contains(err.Format(), want) {
			t.Errorf("%v: no %q in %v", r, want, err)
		}
	}
	_ = unix.Close(c.fd)
	ended := make(chan error, 1)
	go func() { ended <- c.cmd.Wait() }()
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		t.Error("the child outlives its socket")
	}
}

// reader gives the bytes of an archive's tensors.
func reader(t *testing.T, path string) func(name string) []byte {
	t.Helper()
	a, err := pt2.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.Close() })
	return func(name string) []byte {
		x, err := a.Tensor(name)
		if err != nil {
			t.Fatal(err)
		}
		single := make([]float32, x.Shape().Elements())
		if err := x.Read(single); err != nil {
			t.Fatal(err)
		}
		data := make([]byte, 4*len(single))
		dtype.F32.Encode(data, single)
		return data
	}
}
