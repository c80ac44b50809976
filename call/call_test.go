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
	if len(os.Args) == 3 && os.Args[1] == Verb && os.Args[2] == GPU {
		os.Exit(Main(openGPU))
	}
	os.Exit(m.Run())
}

func openGPU(ctx context.Context) (*engine.Engine, error) {
	return engine.Open(ctx, "cuda13", engine.Options{OnDemand: true})
}

func openCPU(ctx context.Context) (*engine.Engine, error) {
	return engine.Open(ctx, "cpu", engine.Options{Cache: enginetest.Cache()})
}

// A caller is the other end of a child's socket, which exchange sends a message over.
type caller struct {
	t        *testing.T
	n        int64
	exchange func(body []byte, fds ...int) []byte
	// block makes memory that both have.
	block func(n, size int64) region

	fd     int
	blocks blocks
	cmd    *exec.Cmd
}

// A region is memory that a child computes with.
type region interface {
	write(at int64, data []byte)
	read(at, size int64) []byte
}

type mapped []byte

func (m mapped) write(at int64, data []byte) { copy(m[at:], data) }

func (m mapped) read(at, size int64) []byte { return m[at : at+size] }

func start(t *testing.T) *caller {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "socket")
	defer func() { _ = theirs.Close() }()
	c := &caller{t: t, fd: pair[0], blocks: blocks{}, cmd: exec.Command("/proc/self/exe", Verb)}
	c.exchange, c.block = c.send, c.share
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
	a := &answer{}
	if err := json.Unmarshal(c.exchange(body, fds...), a); err != nil {
		c.t.Fatal(err)
	}
	if a.N != c.n {
		c.t.Fatalf("request %d has the answer of %d", c.n, a.N)
	}
	return a, a.Error
}

// send is exchange over the socket.
func (c *caller) send(body []byte, fds ...int) []byte {
	c.t.Helper()
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
	return data
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

// share is block by memory that both have mapped.
func (c *caller) share(n, size int64) region {
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
	return mapped(c.blocks[n].data)
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

// A model is a captured program in a child, and its memory there: block 1 has the parameters, 2 the
// inputs, 3 the outputs, 4 the gradients.
type modelled struct {
	*caller
	program                     int64
	d                           *described
	want                        *safetensors.Set
	params, inputs, outs, grads region
	places                      map[string]place
	where, seeds, room          []place
	loss                        int
}

func agree(t *testing.T, name string) {
	start(t).model(name).agree()
}

// wide is how far apart tensors begin, in bytes.
func wide(bytes int64) int64 { return (bytes + gpuAlignment - 1) / gpuAlignment * gpuAlignment }

// model opens and compiles a program, and puts parameters, inputs and seeds where it reads them.
func (c *caller) model(name string) *modelled {
	c.t.Helper()
	path := filepath.Join(c.t.TempDir(), "m.pt2")
	if err := os.WriteFile(path, unpack(c.t, name+".pt2.gz"), 0o600); err != nil {
		c.t.Fatal(err)
	}
	want, err := safetensors.Parse(name, unpack(c.t, name+".safetensors.gz"))
	if err != nil {
		c.t.Fatal(err)
	}
	m := &modelled{caller: c, want: want, places: map[string]place{}, loss: -1}
	m.program = c.must(map[string]any{"do": "open", "path": path}).Program
	m.d = c.must(map[string]any{"do": "compile", "program": m.program, "wish": wish{Grad: true,
		Sizes: [][]int64{{2, 6}, {2, 6}}}}).Compiled
	m.params = c.block(1, 1<<20)
	s := reader(c.t, path)
	at := int64(0)
	for _, p := range m.d.Params {
		each := p.Bytes / int64(len(p.Tensors))
		for i, tensor := range p.Tensors {
			m.places[tensor] = place{1, at + int64(i)*each}
			m.params.write(at+int64(i)*each, s(tensor))
		}
		at += wide(p.Bytes)
	}
	c.must(map[string]any{"do": "bind", "program": m.program, "places": m.places})
	m.inputs, m.outs, m.grads = c.block(2, 4096), c.block(3, 1<<16), c.block(4, 1<<20)
	for i, input := range []string{"input_ids", "labels"} {
		var data []byte
		for _, x := range floats(c.t, want, input) {
			data = binary.LittleEndian.AppendUint64(data, uint64(int64(x)))
		}
		m.inputs.write(int64(i)*1024, data)
	}
	m.inputs.write(2048, binary.LittleEndian.AppendUint32(nil, math.Float32bits(1)))
	for i, r := range m.d.Results {
		m.where, m.seeds = append(m.where, place{3, int64(i) << 15}), append(m.seeds, place{-1, 0})
		if len(r.Dims) == 0 {
			m.loss, m.seeds[i] = i, place{2, 2048}
		}
	}
	at = 0
	for _, g := range m.d.Grads {
		m.room = append(m.room, place{4, at})
		at += wide(g.Bytes)
	}
	return m
}

// forward gives the number of a call, and its loss.
func (m *modelled) forward() (call int64, loss float64) {
	m.t.Helper()
	m.must(map[string]any{"do": "forward", "variant": m.d.Variant, "outs": m.where,
		"args": []place{{2, 0}, {2, 1024}}})
	bits := binary.LittleEndian.Uint32(m.outs.read(int64(m.loss)<<15, 4))
	return m.n, float64(math.Float32frombits(bits))
}

func (m *modelled) backward(call int64) (*answer, *diag.Error) {
	m.t.Helper()
	return m.ask(map[string]any{"do": "backward", "call": call, "seeds": m.seeds, "outs": m.room})
}

func (m *modelled) agree() {
	t := m.t
	t.Helper()
	first, have := m.forward()
	if eager := floats(t, m.want, "loss")[0]; !(math.Abs(have-eager) <= 1e-5*eager) { // or NaN
		t.Errorf("the loss is %v, and PyTorch's %v", have, eager)
	}
	for i, r := range m.d.Results {
		if i != m.loss && len(r.Dims) > 1 {
			logits := floats(t, m.want, "logits")
			compare(t, "logits", m.outs.read(m.where[i][1], int64(4*len(logits))), logits, 1e-5)
		}
	}
	for range 2 {
		m.grads.write(0, make([]byte, 1<<20))
		if _, err := m.backward(first); err != nil {
			t.Fatal(err.Format())
		}
		for i, g := range m.d.Grads {
			each := g.Bytes / int64(len(g.Tensors))
			for k, tensor := range g.Tensors {
				compare(t, "gradient of "+tensor, m.grads.read(m.room[i][1]+int64(k)*each, each),
					floats(t, m.want, "grad."+tensor), 1e-4)
			}
		}
	}
	// Parameters that do not follow each other are put together.
	scattered, places, at := m.block(6, 1<<20), map[string]place{}, int64(0)
	for _, p := range m.d.Params {
		each := p.Bytes / int64(len(p.Tensors))
		for _, tensor := range p.Tensors {
			scattered.write(at, m.params.read(m.places[tensor][1], each))
			places[tensor] = place{6, at}
			at += wide(each) + gpuAlignment/2 // of which the host's can be read there
		}
	}
	m.must(map[string]any{"do": "bind", "program": m.program, "places": places})
	if _, again := m.forward(); !(math.Abs(again-have) <= 1e-6) {
		t.Errorf("with parameters apart from each other the loss is %v, not %v", again, have)
	}
	m.must(map[string]any{"do": "bind", "program": m.program, "places": m.places, "free": []int64{m.n},
		"unmap": []int64{6}})
	m.params.write(0, make([]byte, 1<<20)) // every logit is the same
	second, have := m.forward()
	if !(math.Abs(have-math.Log(40)) <= 1e-5) {
		t.Errorf("with parameters of 0 the loss is %v", have)
	}
	a := m.must(map[string]any{"do": "hello", "free": []int64{first, second}})
	if a.Live != 0 {
		t.Errorf("%d calls are kept", a.Live)
	}
	if _, gone := m.backward(first); gone == nil || gone.Code != diag.BufferGone {
		t.Errorf("the gradient of a freed call: %v", gone)
	}
	// A call whose inputs are unmapped is over, and a parameter that is unmapped is missed by name.
	third, _ := m.forward()
	m.must(map[string]any{"do": "hello", "unmap": []int64{1, 2}})
	if _, gone := m.backward(third); gone == nil || gone.Code != diag.BufferGone {
		t.Errorf("the gradient of a call whose inputs are gone: %v", gone)
	}
	m.block(5, 4096)
	_, gone := m.ask(map[string]any{"do": "forward", "variant": m.d.Variant, "outs": m.where,
		"args": []place{{5, 0}, {5, 1024}}})
	if gone == nil || !strings.Contains(gone.Format(), "has not said where") {
		t.Errorf("a call without its parameters: %v", gone)
	}
	m.must(map[string]any{"do": "close", "program": m.program})
}

// compare compares a tensor by its norm, or a thousandth of 1 where it is nearly 0.
func compare(t *testing.T, what string, have []byte, want []float64, bound float64) {
	t.Helper()
	diff, norm := 0.0, 0.0
	for i, w := range want {
		h := float64(math.Float32frombits(binary.LittleEndian.Uint32(have[4*i:])))
		diff, norm = diff+(h-w)*(h-w), norm+w*w
	}
	if off := math.Sqrt(diff); !(off <= bound*math.Max(math.Sqrt(norm), 1e-3)) {
		t.Errorf("the %s is off by %v of %v", what, off, math.Sqrt(norm))
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
