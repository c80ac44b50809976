package softgpu

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
)

const blockHead = `.version 9.4
.target sm_100a
.address_size 64
`

// words runs a kernel of one block with a buffer of n words for its results, and gives them.
func (p *ptxProcess) words(t testing.TB, text string, threads, n uint32) []uint32 {
	t.Helper()
	out, err := p.run(t, ptxCase{text: blockHead + text, kernel: "k", grid: [3]uint32{1, 1, 1},
		block: [3]uint32{threads, 1, 1}, dynamic: 1024, check: true, buffers: [][]byte{make([]byte, 4*n)}})
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	words := make([]uint32, n)
	for k := range words {
		words[k] = binary.LittleEndian.Uint32(out[0][4*k:])
	}
	return words
}

// warpKernel stores what body leaves in %r0 by thread, from the thread's number in %r1.
func warpKernel(body string) string {
	return `.visible .entry k(.param .u64 out) {
	.reg .b32 %r<30>;
	.reg .b64 %q<9>;
	.reg .pred %p<9>;
	ld.param.u64 %q1, [out];
	mov.u32 %r1, %tid.x;
	mul.wide.u32 %q2, %r1, 4;
	add.s64 %q1, %q1, %q2;
	` + body + `
	st.global.b32 [%q1], %r0;
	ret;
}`
}

func TestLanesExchangeValues(t *testing.T) {
	p := startPTX(t)
	for _, c := range []struct {
		body string
		want func(lane uint32) uint32
	}{
		{"shfl.sync.bfly.b32 %r0, %r1, 16, 31, -1;", func(l uint32) uint32 { return l ^ 16 }},
		{"shfl.sync.down.b32 %r0, %r1, 3, 31, -1;", func(l uint32) uint32 {
			if l+3 > 31 {
				return l
			}
			return l + 3
		}},
		{"shfl.sync.up.b32 %r0|%p1, %r1, 2, 0, -1; @!%p1 mov.b32 %r0, 99;", func(l uint32) uint32 {
			if l < 2 {
				return 99
			}
			return l - 2
		}},
		{"shfl.sync.idx.b32 %r0, %r1, 1, 6175, -1;", func(l uint32) uint32 { return l&^7 | 1 }},
		{"redux.sync.add.s32 %r0, %r1, -1;", func(uint32) uint32 { return 496 }},
		{"sub.s32 %r2, 5, %r1; redux.sync.max.s32 %r0, %r2, -1;", func(uint32) uint32 { return 5 }},
		{"sub.s32 %r2, 5, %r1; redux.sync.min.u32 %r0, %r2, -1;", func(uint32) uint32 { return 0 }},
		{"setp.gt.u32 %p1, %r1, 20; vote.sync.ballot.b32 %r0, %p1, -1;",
			func(uint32) uint32 { return 0xffe00000 }},
		{"setp.gt.u32 %p1, %r1, 20; vote.sync.any.pred %p2, !%p1, -1; selp.b32 %r0, 1, 0, %p2;",
			func(uint32) uint32 { return 1 }},
		{"setp.gt.u32 %p1, %r1, 20; vote.sync.all.pred %p2, %p1, -1; selp.b32 %r0, 1, 0, %p2;",
			func(uint32) uint32 { return 0 }},
		{"and.b32 %r2, %r1, 3; match.any.sync.b32 %r0, %r2, -1;",
			func(l uint32) uint32 { return 0x11111111 << (l & 3) }},
		{"match.all.sync.b32 %r0|%p1, 7, -1;", func(uint32) uint32 { return 0xffffffff }},
		{"elect.sync %r2|%p1, -1; selp.b32 %r0, 1, 0, %p1;", func(l uint32) uint32 {
			if l == 0 {
				return 1
			}
			return 0
		}},
		{"mov.u32 %r0, %lanemask_lt;", func(l uint32) uint32 { return 1<<l - 1 }},
		// Halves of the warp take different ways and shuffle among themselves.
		{"setp.lt.u32 %p1, %r1, 16; @%p1 bra $low;" +
			"shfl.sync.bfly.b32 %r0, %r1, 1, 31, 0xffff0000; bra $end;" +
			"$low: shfl.sync.bfly.b32 %r0, %r1, 2, 31, 0xffff; $end:", func(l uint32) uint32 {
			if l < 16 {
				return l ^ 2
			}
			return l ^ 1
		}},
		// The ways are of different length, and meet at a shuffle of all.
		{"mov.b32 %r2, %r1; setp.lt.u32 %p1, %r1, 7; @!%p1 bra $meet;" +
			"$again: add.s32 %r2, %r2, 32; setp.lt.u32 %p2, %r2, 200; @%p2 bra $again;" +
			"$meet: shfl.sync.idx.b32 %r0, %r2, 3, 31, -1;", func(uint32) uint32 { return 227 }},
		// Exited lanes are not waited for. What they stored before stays.
		{"setp.gt.u32 %p1, %r1, 27; st.global.b32 [%q1], 77; @%p1 ret;" +
			"redux.sync.add.s32 %r0, 1, -1;", func(l uint32) uint32 {
			if l > 27 {
				return 77
			}
			return 28
		}},
	} {
		for lane, got := range p.words(t, warpKernel(c.body), 32, 32) {
			if want := c.want(uint32(lane)); got != want {
				t.Errorf("%s: lane %d has %d, want %d", c.body, lane, got, want)
				break
			}
		}
	}
}

func TestBarriersAndSharedMemory(t *testing.T) {
	p := startPTX(t)
	// Every thread writes, and reads what a thread of another warp wrote, 50 times.
	text := `.visible .entry k(.param .u64 out) {
	.reg .b32 %r<30>; .reg .b64 %q<9>; .reg .pred %p<9>;
	.shared .align 4 .b8 buffer[512];
	ld.param.u64 %q1, [out];
	mov.u32 %r1, %tid.x;
	mov.b32 %r0, %r1;
	mov.b32 %r9, 0;
	mov.u64 %q3, buffer;
	$loop:
	mul.wide.u32 %q2, %r1, 4;
	add.s64 %q4, %q3, %q2;
	st.shared.b32 [%q4], %r0;
	bar.sync 0;
	add.s32 %r2, %r1, 37;
	and.b32 %r2, %r2, 127;
	mul.wide.u32 %q5, %r2, 4;
	add.s64 %q4, %q3, %q5;
	ld.shared.b32 %r0, [%q4];
	bar.sync 0;
	add.s32 %r9, %r9, 1;
	setp.lt.u32 %p1, %r9, 50;
	@%p1 bra $loop;
	add.s64 %q1, %q1, %q2;
	st.global.b32 [%q1], %r0;
	ret;
}`
	for thread, got := range p.words(t, text, 128, 128) {
		if want := uint32(thread+50*37) % 128; got != want {
			t.Fatalf("thread %d has %d, want %d", thread, got, want)
		}
	}
	// The warps of 96 threads count at barrier 1; the others never come to it.
	text = `.visible .entry k(.param .u64 out) {
	.reg .b32 %r<30>; .reg .b64 %q<9>; .reg .pred %p<9>;
	ld.param.u64 %q1, [out];
	mov.u32 %r1, %tid.x;
	setp.ge.u32 %p1, %r1, 96;
	@%p1 bra $end;
	setp.lt.u32 %p2, %r1, 40;
	bar.red.popc.u32 %r2, 1, 96, %p2;
	mul.wide.u32 %q2, %r1, 4;
	add.s64 %q1, %q1, %q2;
	st.global.b32 [%q1], %r2;
	$end: bar.sync 0;
	ret;
}`
	for thread, got := range p.words(t, text, 128, 128) {
		if want := map[bool]uint32{true: 40}[thread < 96]; got != want {
			t.Fatalf("thread %d has %d, want %d", thread, got, want)
		}
	}
}

// Variables outside and inside kernels, of all state spaces, with initializers and addresses.
func TestVariables(t *testing.T) {
	text := `.global .align 4 .b32 table[4] = {10, 20, 0x1E, 40};
.const .f32 half = 0.5;
.global .u64 pointer = table + 8;
.visible .global .align 2 .b8 bytes[3] = {1, 2, 3};
.extern .shared .align 16 .b8 dynamic[];
.visible .entry k(.param .u64 out) {
	.local .align 8 .b8 depot[16];
	.reg .b64 %SP; .reg .b64 %SPL; .reg .b16 %h<3>;
	.reg .b32 %r<30>; .reg .b64 %q<19>;
	.shared .align 4 .b8 own[4];
	ld.param.u64 %q1, [out];
	cvta.to.global.u64 %q1, %q1;
	mov.b64 %SPL, depot;
	cvta.local.u64 %SP, %SPL;
	ld.global.b32 %r1, [table+4];
	st.global.b32 [%q1], %r1;
	ld.const.b32 %r2, [half];
	st.global.b32 [%q1+4], %r2;
	ld.global.u64 %q2, [pointer];
	ld.b32 %r3, [%q2];
	st.global.b32 [%q1+8], %r3;
	ld.global.s8 %r4, [bytes+2];
	st.global.b32 [%q1+12], %r4;
	st.local.b32 [%SPL+4], 55;
	ld.b32 %r5, [%SP+4];
	st.global.b32 [%q1+16], %r5;
	st.shared.b32 [own], 66;
	st.shared.b32 [dynamic], 77;
	mov.b64 %q3, dynamic;
	ld.shared.b32 %r6, [%q3];
	st.global.b32 [%q1+20], %r6;
	mov.u64 %q4, own;
	cvta.shared.u64 %q5, %q4;
	ld.b32 %r7, [%q5];
	st.global.b32 [%q1+24], %r7;
	st.global.v2.b32 [%q1+32], {%r6, 88};
	ld.global.v2.b32 {%r8, _}, [%q1+32];
	st.global.b32 [%q1+28], %r8;
	ret;
}`
	got := startPTX(t).words(t, text, 1, 10)
	want := []uint32{20, math.Float32bits(0.5), 30, 3, 55, 77, 66, 77, 77, 88}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestAtomics(t *testing.T) {
	text := `.visible .entry k(.param .u64 out) {
	.reg .b32 %r<30>; .reg .b64 %q<9>; .reg .pred %p<9>; .reg .b16 %h<9>;
	.shared .align 4 .b8 s[4];
	ld.param.u64 %q1, [out];
	mov.u32 %r1, %tid.x;
	cvt.rn.f32.u32 %r2, %r1;
	atom.global.add.u32 %r3, [%q1], 1;
	red.global.max.s32 [%q1+4], %r1;
	red.relaxed.gpu.global.add.f32 [%q1+8], %r2;
	cvt.rn.bf16.f32 %h1, 0f3F800000;
	atom.relaxed.sys.global.add.noftz.bf16 %h2, [%q1+12], %h1;
	atom.global.inc.u32 %r4, [%q1+16], 9;
	$retry: ld.global.b32 %r5, [%q1+20];
	add.s32 %r6, %r5, 2;
	atom.cas.b32 %r7, [%q1+20], %r5, %r6;
	setp.ne.b32 %p1, %r7, %r5;
	@%p1 bra $retry;
	atom.or.b32 %r8, [%q1+24], %r1;
	ret;
}`
	p := startPTX(t)
	got := p.words(t, text, 96, 7)
	want := []uint32{96, 95, math.Float32bits(95 * 96 / 2), uint32(dtype.BF16FromF32(96)), 6, 192, 127}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// A kernel that this interpreter does not know fails by name, and the others of its module run.
func TestUnknownInstructionsFailByName(t *testing.T) {
	p := startPTX(t)
	for body, want := range map[string]string{
		"frobnicate.b32 %r0, %r1;":                       "opcode frobnicate.b32 is not known",
		"add.f8 %r0, %r1, %r2;":                          "add.f8: a type or modifier is not known",
		"add.rn.wobbly.f32 %r0, %r1, %r2;":               "add.rn.wobbly.f32: a type or modifier is not known",
		"add.s32 %r0, %r1;":                              "number of operands",
		"add.s32 %r0, %r1, %q1;":                         "size of operand %q1",
		"add.s32 %r0, %r1, %r99;":                        "no register or variable %r99",
		"mov.u32 %r0, %clock;":                           "no register or variable %clock",
		"bra $nowhere;":                                  "label $nowhere is not there",
		"and.pred %p0, %p1, !%p2;":                       "negated %p2",
		"add.f32 %r0, %r1, 1;":                           "an integer stands for f32",
		"cvt.bf16.f32 %h0, %r1;":                         "a rounding mode is missing",
		"tcgen05.wait::ld.sync.aligned;":                 "opcode tcgen05.wait::ld.sync.aligned is not known",
		"call.uni (%r0), other, (%r1);":                  "opcode call.uni is not known",
		"wgmma.fence.sync.aligned; add.s32 %r0, %r0, 1;": "opcode wgmma.fence.sync.aligned is not known",
		"cp.async.bulk.tensor.2d.shared::cta.global [%r1], [%q1, {%r1, %r2}];": "operands are not known",
	} {
		c := laneCase(body, 'r', [][3]uint64{{1, 2, 3}})
		c.text += ".visible .entry fine() { ret; }\n"
		_, err := p.run(t, c)
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "kernel k, line ") {
			t.Errorf("%s: %v, want %q", body, err, want)
		}
		c.kernel, c.buffers = "fine", nil
		if _, err := p.run(t, c); err != nil {
			t.Errorf("%s stops another kernel: %v", body, err)
		}
	}
}

// What would hang or crash a GPU ends a launch with an error that says where.
func TestFaultsAreNamed(t *testing.T) {
	p := startPTX(t)
	for body, want := range map[string]string{
		"setp.lt.u32 %p1, %r1, 40; @%p1 bar.sync 0; @!%p1 bar.sync 1;":                           "deadlock: 40 of 64 threads are at barrier 0",
		"setp.lt.u32 %p1, %r1, 5; @%p1 bar.sync 3, 64;":                                          "deadlock: 5 of 64 threads are at barrier 3",
		"setp.lt.u32 %p1, %r1, 5; @%p1 shfl.sync.idx.b32 %r0, %r1, 0, 31, -1; @!%p1 bar.sync 0;": "deadlock: lanes 0x1f wait",
		"shfl.sync.idx.b32 %r0, %r1, 0, 31, 1;":                                                  "not in their own member mask",
		"ld.global.b32 %r0, [%q1+1000];":                                                         "outside memory",
		"st.global.b32 [%q1+-1000], %r1;":                                                        "outside memory",
		"ld.global.b32 %r0, [%q1+2];":                                                            "misaligned address",
		"mov.b64 %q3, 0; ld.global.b32 %r0, [%q3];":                                              "outside memory",
		"mov.b64 %q3, 2000; ld.shared.b32 %r0, [%q3];":                                           "of shared memory",
		"trap;": "the kernel stops itself",
	} {
		_, err := p.run(t, ptxCase{text: blockHead + warpKernel(body), kernel: "k", grid: [3]uint32{2, 1, 1},
			block: [3]uint32{64, 1, 1}, dynamic: 1024, check: true, buffers: [][]byte{make([]byte, 512)}})
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "kernel k, line ") {
			t.Errorf("%s: %v, want %q", body, err, want)
		}
	}
	c := ptxCase{text: blockHead + ".entry k() .reqntid 64, 1, 1 { ret; }", kernel: "k",
		grid: [3]uint32{1, 1, 1}, block: [3]uint32{32, 1, 1}}
	if _, err := p.run(t, c); err == nil || !strings.Contains(err.Error(), ".reqntid says 64x1x1") {
		t.Errorf("a launch with the wrong block: %v", err)
	}
}

// ldmatrix of a 16 x 16 matrix in shared memory, whose element (r, c) is 16*r + c.
func TestMatrices(t *testing.T) {
	p := startPTX(t)
	head := `.visible .entry k(.param .u64 out) {
	.reg .b32 %r<40>; .reg .b64 %q<9>; .reg .b16 %h<9>;
	.shared .align 16 .b8 m[512];
	ld.param.u64 %q1, [out];
	mov.u32 %r1, %tid.x;
	mul.wide.u32 %q2, %r1, 16;
	add.s64 %q1, %q1, %q2;
	mov.u64 %q3, m;
	add.s64 %q3, %q3, %q2;
	shl.b32 %r2, %r1, 3;
	mov.b32 %r9, 0;
`
	var fill strings.Builder // lane l writes elements 8*l to 8*l + 7
	for n := range 8 {
		fmt.Fprintf(&fill, "add.s32 %%r3, %%r2, %d; cvt.u16.u32 %%h1, %%r3; st.shared.b16 [%%q3+%d], %%h1;\n", n, 2*n)
	}
	// Lanes 0 to 15 point to the left halves of rows 0 to 15, lanes 16 to 31 to the right halves.
	load := `bar.sync 0;
	and.b32 %r4, %r1, 15; shr.u32 %r5, %r1, 4;
	shl.b32 %r4, %r4, 5; shl.b32 %r5, %r5, 4; add.s32 %r4, %r4, %r5;
	mov.u32 %r6, m; add.s32 %r4, %r4, %r6;
	ldmatrix.sync.aligned.m8n8.x4.TRANS.shared.b16 {%r10, %r11, %r12, %r13}, [%r4];
	st.global.v4.b32 [%q1], {%r10, %r11, %r12, %r13};
	ret; }`
	for _, trans := range []string{"", ".trans"} {
		got := p.words(t, head+fill.String()+strings.ReplaceAll(load, ".TRANS", trans), 32, 128)
		for l := range 32 {
			for m := range 4 {
				r, c := l/4+8*(m%2), 2*(l%4)+8*(m/2)
				want := uint32(16*r+c) | uint32(16*r+c+1)<<16
				if trans != "" {
					r, c = 2*(l%4)+8*(m%2), l/4+8*(m/2)
					want = uint32(16*r+c) | uint32(16*(r+1)+c)<<16
				}
				if got[4*l+m] != want {
					t.Fatalf("ldmatrix%s: lane %d has %#x of matrix %d, want %#x", trans, l, got[4*l+m], m, want)
				}
			}
		}
	}
}

// mma.sync against the product in Go, for the fragments' layout.
func TestMMA(t *testing.T) {
	p := startPTX(t)
	text := `.visible .entry k(.param .u64 out) {
	.reg .b32 %r<40>; .reg .b64 %q<9>;
	ld.param.u64 %q1, [out];
	mov.u32 %r1, %tid.x;
	mul.wide.u32 %q2, %r1, 40;
	add.s64 %q1, %q1, %q2;
	ld.global.v2.b32 {%r10, %r11}, [%q1];
	ld.global.v2.b32 {%r12, %r13}, [%q1+8];
	ld.global.v2.b32 {%r14, %r15}, [%q1+16];
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r20, %r21, %r22, %r23},
		{%r10, %r11, %r12, %r13}, {%r14, %r15}, {0f3F800000, 0f3F800000, 0f3F800000, 0f3F800000};
	st.global.v2.b32 [%q1+24], {%r20, %r21};
	st.global.v2.b32 [%q1+32], {%r22, %r23};
	ret; }`
	a := func(m, k int) float32 { return float32((m*7+k*3)%11) - 5 }
	b := func(k, n int) float32 { return float32((k*5+n*2)%13) - 6 }
	pair := func(x, y float32) uint32 {
		return uint32(dtype.BF16FromF32(x)) | uint32(dtype.BF16FromF32(y))<<16
	}
	buffer := make([]byte, 32*40)
	for l := range 32 {
		g, c := l/4, 2*(l%4)
		for n, word := range []uint32{pair(a(g, c), a(g, c+1)), pair(a(g+8, c), a(g+8, c+1)),
			pair(a(g, c+8), a(g, c+9)), pair(a(g+8, c+8), a(g+8, c+9)),
			pair(b(c, g), b(c+1, g)), pair(b(c+8, g), b(c+9, g))} {
			binary.LittleEndian.PutUint32(buffer[40*l+4*n:], word)
		}
	}
	out, err := p.run(t, ptxCase{text: blockHead + text, kernel: "k", grid: [3]uint32{1, 1, 1},
		block: [3]uint32{32, 1, 1}, buffers: [][]byte{buffer}})
	if err != nil {
		t.Fatal(err)
	}
	for l := range 32 {
		for n := range 4 {
			row, column := l/4+8*(n/2), 2*(l%4)+n%2
			want := float32(1)
			for k := range 16 {
				want += a(row, k) * b(k, column)
			}
			got := math.Float32frombits(binary.LittleEndian.Uint32(out[0][40*l+24+4*n:]))
			if got != want {
				t.Fatalf("element %d, %d is %v, want %v", row, column, got, want)
			}
		}
	}
}

// spellings.ptx has one instruction of every spelling that XLA wrote for Deepwell's step programs.
func TestSpellingsOfStepProgramsAreKnown(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("testdata", "spellings.ptx"))
	if err != nil {
		t.Fatal(err)
	}
	p := startPTX(t)
	for n, line := range strings.Split(string(text), "\n") {
		if strings.HasPrefix(line, "//") || strings.TrimSpace(line) == "" {
			continue
		}
		kernel := `.visible .entry k() {
	.reg .pred %p<99>; .reg .b16 %rs<9999>; .reg .b32 %r<99999>; .reg .b64 %rd<99999>; .reg .b64 %SPL; .reg .b64 %SP;
	` + strings.TrimSpace(line) + "\n\tret;\n}\n"
		// A launch with a block that is too large reports the kernel's problem first.
		_, err := p.run(t, ptxCase{text: blockHead + kernel, kernel: "k", grid: [3]uint32{1, 1, 1}, block: [3]uint32{2000, 1, 1}})
		if err == nil || !strings.Contains(err.Error(), "empty grid or block") {
			t.Errorf("spellings.ptx:%d: %s: %v", n+1, line, err)
		}
	}
}

// Damaged text is refused, or runs into an error, but never crashes the interpreter.
func TestDamagedTextDoesNotCrash(t *testing.T) {
	p := startPTX(t, "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1")
	var seeds []string
	for _, ops := range [][]ptxOp{integerOps, floatOps, convertOps} {
		for n, op := range ops {
			if n%4 == 0 {
				seeds = append(seeds, laneCase(op.body, op.result, [][3]uint64{{1, 2, 3}}).text)
			}
		}
	}
	spellings, err := os.ReadFile(filepath.Join("testdata", "spellings.ptx"))
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(string(spellings), "\n")
	parts := []string{"{", "}", "[", "]", ";", ":", "@", "!", "|", ",", "<", ">", "(", ")", "%r1", "%q1", ".reg", ".b32",
		".shared", ".global", "=", "-1", "0f", "0x", "99999999999999999999", ".v4", "/*", "//", "\x00", "\xff", "_", "+", "-", "$a:"}
	random := rand.New(rand.NewPCG(1, 2))
	rounds := 1500
	if testing.Short() {
		rounds = 200
	}
	for range rounds {
		text := []byte(seeds[random.IntN(len(seeds))])
		for range 1 + random.IntN(4) {
			at := random.IntN(len(text))
			switch random.IntN(5) {
			case 0: // a byte
				text[at] = byte(random.IntN(256))
			case 1: // a gap
				text = append(text[:at], text[min(len(text), at+random.IntN(30)):]...)
			case 2, 3: // a word
				word := parts[random.IntN(len(parts))]
				text = append(text[:at], append([]byte(word), text[at:]...)...)
			case 4: // another instruction
				line := lines[random.IntN(len(lines))]
				text = append(text[:at], append([]byte("\n"+line+"\n"), text[at:]...)...)
			}
			if len(text) == 0 {
				text = []byte(".")
			}
		}
		c := laneCase("", 'r', [][3]uint64{{1, 2, 3}})
		c.text, c.kernel = string(text), ""
		p.run(t, c) //nolint:errcheck // an error is as good as none
	}
}
