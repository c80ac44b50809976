package softgpu

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// buildPTX compiles testdata/ptxrun.c with the interpreter, or finds it in the user's cache.
func buildPTX(t testing.TB, more ...string) string {
	t.Helper()
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("no C compiler: the PTX interpreter cannot be built")
	}
	args := []string{"-Werror", level("ptx.c"), "testdata/ptxrun.c"}
	for _, flag := range flags {
		if flag != "-shared" && !strings.HasPrefix(flag, "-Wl,") {
			args = append(args, flag)
		}
	}
	sources, err := filepath.Glob("c/ptx_*.c")
	if err != nil {
		t.Fatal(err)
	}
	args = append(append(append(args, more...), sources...), "-lm")
	key, err := digest(cc, strings.Join(args, " "))
	if err != nil {
		t.Fatal(err)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(cache, "deepwell-test", "softgpu", "ptxrun-"+key)
	if _, err := os.Stat(out); err == nil {
		return out
	}
	if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
		t.Fatal(err)
	}
	built := filepath.Join(t.TempDir(), "ptxrun")
	if text, err := exec.Command(cc, append(args, "-o", built)...).CombinedOutput(); err != nil {
		if len(more) > 0 {
			t.Skipf("cc cannot %v: %v\n%s", more, err, text)
		}
		t.Fatalf("cc: %v\n%s", err, text)
	}
	if err := os.Rename(built, out); err != nil {
		return built // another file system
	}
	return out
}

// A ptxProcess runs cases in a child process.
type ptxProcess struct {
	in     io.WriteCloser
	out    *bufio.Reader
	stderr bytes.Buffer
	cmd    *exec.Cmd
}

func startPTX(t testing.TB, flags ...string) *ptxProcess {
	t.Helper()
	p := &ptxProcess{cmd: exec.Command(buildPTX(t, flags...))}
	p.cmd.Stderr = &p.stderr
	in, err := p.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p.in, p.out = in, bufio.NewReader(out)
	t.Cleanup(func() {
		p.in.Close()
		if err := p.cmd.Wait(); err != nil {
			t.Errorf("%v\n%s", err, p.stderr.String())
		}
	})
	return p
}

// A ptxCase is one launch; buffers are the kernel's arguments, read and written.
type ptxCase struct {
	text, kernel string // without a kernel the text is only loaded
	grid, block  [3]uint32
	dynamic      uint32
	check        bool
	buffers      [][]byte
}

func (c ptxCase) encode() []byte {
	var b []byte
	word := func(v uint32) { b = binary.LittleEndian.AppendUint32(b, v) }
	text := func(s []byte) { word(uint32(len(s))); b = append(b, s...) }
	text([]byte(c.text))
	text([]byte(c.kernel))
	for _, v := range append(c.grid[:], c.block[:]...) {
		word(v)
	}
	word(c.dynamic)
	word(map[bool]uint32{true: 1}[c.check])
	word(uint32(len(c.buffers)))
	for _, buffer := range c.buffers {
		text(buffer)
	}
	return b
}

// run gives the buffers after the launch, or the interpreter's error.
func (p *ptxProcess) run(t testing.TB, c ptxCase) ([][]byte, error) {
	t.Helper()
	if _, err := p.in.Write(c.encode()); err != nil {
		t.Fatalf("the interpreter died: %v\n%s", err, p.stderr.String())
	}
	read := func(n uint32) []byte {
		b := make([]byte, n)
		if _, err := io.ReadFull(p.out, b); err != nil {
			p.cmd.Wait()
			t.Fatalf("the interpreter died: %v\n%s", err, p.stderr.String())
		}
		return b
	}
	word := func() uint32 { return binary.LittleEndian.Uint32(read(4)) }
	if word() != 0 {
		return nil, errors.New(string(read(word())))
	}
	var buffers [][]byte
	for _, b := range c.buffers {
		buffers = append(buffers, read(uint32(len(b))))
	}
	return buffers, nil
}

// The registers of a lane's inputs a, b and c are %q1 to %q3, %r1 to %r3 and %h1 to %h3 (64, 32 and
// 16 bits) and %p1 to %p3 (bit 0); the result is read from %q0, %r0, %h0 or %p0.
const laneHead = `.version 9.4
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 .ptr .align 8 in, .param .u64 out)
{
	.reg .b16 %h<20>;
	.reg .b32 %r<40>;
	.reg .b64 %q<40>;
	.reg .b64 %x<9>;
	.reg .pred %p<20>;
	ld.param.u64 %x1, [in];
	ld.param.u64 %x2, [out];
	mov.u32 %r30, %tid.x;
	mov.u32 %r31, %ctaid.x;
	mov.u32 %r32, %ntid.x;
	mad.lo.s32 %r30, %r31, %r32, %r30;
	mad.wide.u32 %x1, %r30, 24, %x1;
	mad.wide.u32 %x2, %r30, 8, %x2;
	ld.global.u64 %q1, [%x1];
	ld.global.u64 %q2, [%x1+8];
	ld.global.u64 %q3, [%x1+16];
	cvt.u32.u64 %r1, %q1; cvt.u32.u64 %r2, %q2; cvt.u32.u64 %r3, %q3;
	cvt.u16.u64 %h1, %q1; cvt.u16.u64 %h2, %q2; cvt.u16.u64 %h3, %q3;
	and.b64 %q4, %q1, 1; setp.ne.b64 %p1, %q4, 0;
	and.b64 %q4, %q2, 1; setp.ne.b64 %p2, %q4, 0;
	and.b64 %q4, %q3, 1; setp.ne.b64 %p3, %q4, 0;
`

// laneTails store the result, by the letter of its register.
var laneTails = map[byte]string{
	'q': "\tst.global.b64 [%x2], %q0;\n\tret;\n}\n",
	'r': "\tcvt.u64.u32 %q0, %r0;\n\tst.global.b64 [%x2], %q0;\n\tret;\n}\n",
	'h': "\tcvt.u64.u16 %q0, %h0;\n\tst.global.b64 [%x2], %q0;\n\tret;\n}\n",
	'p': "\tselp.b64 %q0, 1, 0, %p0;\n\tst.global.b64 [%x2], %q0;\n\tret;\n}\n",
}

// laneCase makes a case that runs body for every input {a, b, c}; result is q, r, h or p.
func laneCase(body string, result byte, inputs [][3]uint64) ptxCase {
	in := make([]byte, 0, 24*len(inputs))
	for _, v := range inputs {
		for _, x := range v {
			in = binary.LittleEndian.AppendUint64(in, x)
		}
	}
	threads := min(len(inputs), 96)
	blocks := (len(inputs) + threads - 1) / threads
	in = append(in, make([]byte, 24*threads*blocks-len(in))...)
	return ptxCase{text: laneHead + "\t" + body + "\n" + laneTails[result], kernel: "k",
		grid: [3]uint32{uint32(blocks), 1, 1}, block: [3]uint32{uint32(threads), 1, 1}, check: true,
		buffers: [][]byte{in, make([]byte, 8*threads*blocks)}}
}

// lanes runs body and gives the results in the inputs' order.
func (p *ptxProcess) lanes(t testing.TB, body string, result byte, inputs [][3]uint64) []uint64 {
	t.Helper()
	out, err := p.run(t, laneCase(body, result, inputs))
	if err != nil {
		t.Fatalf("%s: %v", body, err)
	}
	values := make([]uint64, len(inputs))
	for n := range values {
		values[n] = binary.LittleEndian.Uint64(out[1][8*n:])
	}
	return values
}
