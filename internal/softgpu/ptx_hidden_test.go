package softgpu

import (
	"encoding/binary"
	"fmt"
	"strings"
	"testing"
)

// A wrongKernel looks right where memory begins as zeros, warps run in order, and copies are made
// at once. It is noticed by an error or, without one, by numbers that a right kernel does not give.
type wrongKernel struct {
	name, body string
	threads    uint32
	want       func(thread uint32) uint32 // what a right kernel gives
	always     bool                       // it is noticed without a seed, too
	message    string                     // the error, or "" for wrong numbers
}

var wrongKernels = []wrongKernel{
	{"shared memory is never initialized", `
	.shared .align 4 .b32 acc[64];
	mov.u32 %r9, acc;
	atom.shared.add.u32 %r8, [%r9], %r1;
	bar.sync 0;
	ld.shared.u32 %r0, [%r9];`, 64, func(uint32) uint32 { return 64 * 63 / 2 }, true, ""},
	{"a register is never initialized", `
	add.u32 %r0, %r20, %r1;`, 32, func(n uint32) uint32 { return n }, true, ""},
	{"no barrier between a write of warp 0 and the reads of the others", `
	.shared .align 4 .b32 s[64];
	mov.u32 %r9, s;
	setp.eq.u32 %p1, %r1, 0;
	mov.u32 %r8, 77;
	@%p1 st.shared.u32 [%r9], %r8;
	ld.shared.u32 %r0, [%r9];`, 64, func(uint32) uint32 { return 77 }, false, ""},
	{"no barrier before shared memory is written again", `
	.shared .align 4 .b32 s[64];
	mov.u32 %r9, s;
	shl.b32 %r10, %r1, 2;
	add.u32 %r10, %r9, %r10;
	st.shared.u32 [%r10], %r1;
	bar.sync 0;
	xor.b32 %r11, %r1, 32;
	shl.b32 %r11, %r11, 2;
	add.u32 %r11, %r9, %r11;
	setp.lt.u32 %p1, %r1, 32;
	@%p1 ld.shared.u32 %r0, [%r11];
	mov.u32 %r12, 5;
	@!%p1 mov.u32 %r0, 9;
	@!%p1 st.shared.u32 [%r10], %r12;`, 64, func(n uint32) uint32 {
		if n < 32 {
			return n ^ 32
		}
		return 9
	}, false, ""},
	{"no wait for cp.async", `
	.shared .align 16 .b32 s[64];
	mov.u32 %r9, s;
	shl.b32 %r10, %r1, 2;
	add.u32 %r10, %r9, %r10;
	st.global.b32 [%q1], %r1;
	cp.async.ca.shared.global [%r10], [%q1], 4;
	ld.shared.u32 %r0, [%r10];`, 32, func(n uint32) uint32 { return n }, true, ""},
	{"shfl reads a lane outside the mask", `
	mov.u32 %r0, 1;
	mov.u32 %r7, 13;
	setp.ge.u32 %p1, %r1, 16;
	@%p1 bra DONE;
	shfl.sync.idx.b32 %r0, %r7, 31, 31, 0x0000ffff;
DONE:`, 32, func(n uint32) uint32 {
		if n < 16 {
			return 13
		}
		return 1
	}, true, "lanes 0x80000000 are read, but only 0xffff take part"},
	{"shfl reads a lane that has exited", `
	mov.u32 %r0, 13;
	st.global.b32 [%q1], %r0;
	mov.u32 %r7, 13;
	setp.ge.u32 %p1, %r1, 16;
	@%p1 ret;
	shfl.sync.idx.b32 %r0, %r7, 31, 31, -1;`, 32, func(uint32) uint32 { return 13 }, true, ""},
	{"halves of a warp at two barrier instructions", `
	setp.ge.u32 %p1, %r1, 16;
	mov.u32 %r0, 3;
	@%p1 bra OTHER;
	bar.sync 0;
	bra DONE;
OTHER:
	bar.sync 0;
DONE:`, 32, func(uint32) uint32 { return 3 }, true,
		"lanes 0xffff0000 of the warp are not at this barrier"},
}

// noticed says how a kernel differs from a right one, or "".
func (k wrongKernel) noticed(t *testing.T, p *ptxProcess) string {
	t.Helper()
	out, err := p.run(t, ptxCase{text: blockHead + warpKernel(k.body), kernel: "k",
		grid: [3]uint32{1, 1, 1}, block: [3]uint32{k.threads, 1, 1}, dynamic: 1024, check: true,
		buffers: [][]byte{make([]byte, 4*k.threads)}})
	if err != nil {
		if k.message == "" || !strings.Contains(err.Error(), k.message) {
			t.Errorf("%v, want %q", err, k.message)
		}
		return err.Error()
	}
	for n := range k.threads {
		if got := binary.LittleEndian.Uint32(out[0][4*n:]); got != k.want(n) {
			return fmt.Sprintf("thread %d has %d, not %d", n, got, k.want(n))
		}
	}
	return ""
}

// A kernel that is wrong on a GPU fails or gives wrong numbers: without a seed where the
// interpreter knows of the fault, and where it is a matter of order under one of four seeds.
func TestWrongKernelsAreNoticed(t *testing.T) {
	seen := map[string][]int{}
	for seed := range 5 {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			t.Setenv("SOFTGPU_ORDER_SEED", fmt.Sprint(seed))
			p := startPTX(t)
			for _, k := range wrongKernels {
				how := k.noticed(t, p)
				if how != "" {
					seen[k.name] = append(seen[k.name], seed)
				} else if k.always && seed == 0 {
					t.Errorf("%s: not noticed without a seed", k.name)
				}
			}
		})
	}
	for _, k := range wrongKernels {
		t.Logf("%s: under seeds %v", k.name, seen[k.name])
		if len(seen[k.name]) == 0 {
			t.Errorf("%s: not noticed", k.name)
		}
	}
}

// Copies that are waited for are right under every seed: two groups, the older one first.
func TestCopiesAreThereAfterTheWait(t *testing.T) {
	body := `
	.shared .align 16 .b32 s[64];
	mov.u32 %r9, s;
	shl.b32 %r10, %r1, 2;
	add.u32 %r10, %r9, %r10;
	st.global.b32 [%q1], %r1;
	cp.async.ca.shared.global [%r10], [%q1], 4;
	cp.async.commit_group;
	cp.async.ca.shared.global [%r10+128], [%q1], 4, 0;
	cp.async.commit_group;
	cp.async.wait_group 1;
	ld.shared.u32 %r0, [%r10];
	cp.async.wait_all;
	ld.shared.u32 %r11, [%r10+128];
	add.u32 %r0, %r0, %r11;`
	for seed := range 5 {
		t.Setenv("SOFTGPU_ORDER_SEED", fmt.Sprint(seed))
		for n, got := range startPTX(t).words(t, warpKernel(body), 32, 32) {
			if got != uint32(n) {
				t.Errorf("seed %d: thread %d has %d", seed, n, got)
			}
		}
	}
}

// Every block of a grid runs once, in whatever order.
func TestBlocksRunOnce(t *testing.T) {
	text := blockHead + `.visible .entry k(.param .u64 out) {
	.reg .b32 %r<9>; .reg .b64 %q<9>;
	ld.param.u64 %q1, [out];
	mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %nctaid.x;
	mad.lo.s32 %r1, %r2, %r3, %r1;
	mul.wide.u32 %q2, %r1, 4;
	add.s64 %q2, %q2, %q1;
	atom.global.add.u32 %r4, [%q2+4], 1;
	atom.global.add.u32 %r5, [%q1], 1;
	ret;
}`
	for seed := range 4 {
		t.Setenv("SOFTGPU_ORDER_SEED", fmt.Sprint(seed))
		p := startPTX(t)
		for blocks := range uint32(40) {
			out, err := p.run(t, ptxCase{text: text, kernel: "k", grid: [3]uint32{blocks + 1, 3, 1},
				block: [3]uint32{1, 1, 1}, check: true, buffers: [][]byte{make([]byte, 4+12*(blocks+1))}})
			if err != nil {
				t.Fatal(err)
			}
			for at := 4; at < len(out[0]); at += 4 {
				if got := binary.LittleEndian.Uint32(out[0][at:]); got != 1 {
					t.Fatalf("seed %d, %d blocks: one ran %d times", seed, 3*(blocks+1), got)
				}
			}
		}
	}
}
