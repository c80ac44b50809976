package stubcuda

import "encoding/binary"

// Result codes of the driver, as cuda.h numbers them.
const (
	invalidValue = 1
	noDevice     = 100
	notFound     = 500
)

// driverVersion is what cuDriverGetVersion stores: 1000 x major + 10 x minor of CUDA 13.4.
const driverVersion = 13040

// Texts of cuGetErrorName and cuGetErrorString. Every failure here is the same one, so the number
// that is asked about does not matter; the text tells a person who sees it whose library this is.
const (
	errorName = "CUDA_ERROR_NO_DEVICE"
	errorText = "no device: this libcuda.so.1 is Deepwell's stand-in for the NVIDIA driver"
)

// A layout says where the parts of the file are, as addresses.
type layout struct {
	names  int               // the string table that holds the names
	nameAt map[string]uint32 // offset of each name in it
	ro     int               // read-only data: see readOnly
	text   int
}

// readOnly writes the table that cuGetProcAddress searches, two words a name (address of the
// text, address of the function), and behind it the two texts.
func readOnly(names []string, at layout, text assembled) []byte {
	var out []byte
	for _, name := range names {
		out = binary.LittleEndian.AppendUint32(out, uint32(at.names)+at.nameAt[name])
		out = binary.LittleEndian.AppendUint32(out, uint32(at.text+text.offset(name)))
	}
	out = append(append(out, errorName...), 0)
	return append(append(out, errorText...), 0)
}

// assembled is machine code and the offset of every function in it; "" is the common one.
type assembled struct {
	code  []byte
	entry map[string]int
}

// offset finds the code of an exported name.
func (a assembled) offset(name string) int {
	if at, special := a.entry[name]; special {
		return at
	}
	return a.entry[""]
}

// assemble writes the functions. All are leaves of the System V calling convention: arguments in
// rdi, rsi, edx, rcx, r8; the result in eax; nothing is pushed.
func assemble(names []string, at layout) assembled {
	a := &assembler{at: map[string]int{}, entry: map[string]int{}}
	tableEnd := at.ro + 8*len(names)
	nameText, longText := tableEnd, tableEnd+len(errorName)+1

	a.function("") // every function without a duty
	a.result(noDevice)

	a.function("cuInit")
	a.result(0)

	a.function("cuDriverGetVersion")
	a.op(0x48, 0x85, 0xff) // test rdi, rdi
	a.jump(je, "invalid")
	a.op(0xc7, 0x07) // mov dword [rdi], version
	a.word(driverVersion)
	a.result(0)

	a.function("cuDeviceGetCount")
	a.op(0x48, 0x85, 0xff) // test rdi, rdi
	a.jump(je, "invalid")
	a.op(0xc7, 0x07) // mov dword [rdi], 0
	a.word(0)
	a.result(0)

	for _, f := range []struct {
		name string
		text int
	}{{"cuGetErrorName", nameText}, {"cuGetErrorString", longText}} {
		a.function(f.name)
		a.op(0x48, 0x85, 0xf6) // test rsi, rsi
		a.jump(je, "invalid")
		a.op(0x48, 0x8d, 0x05) // lea rax, [rip + text]
		a.address(at.text, f.text)
		a.op(0x48, 0x89, 0x06) // mov [rsi], rax
		a.result(0)
	}

	a.lookup(at, tableEnd)

	a.label("invalid")
	a.result(invalidValue)
	return a.finish()
}

// lookup writes cuGetProcAddress(name, result, version, flags[, status]). The list is short and
// asked a few hundred times in a process, so it is searched from the front.
func (a *assembler) lookup(at layout, tableEnd int) {
	a.function("cuGetProcAddress") // four arguments: there is no status to set
	a.op(0x45, 0x31, 0xc0)         // xor r8d, r8d

	a.function("cuGetProcAddress_v2")
	a.op(0x48, 0x85, 0xff) // test rdi, rdi
	a.jump(je, "invalid")
	a.op(0x48, 0x85, 0xf6) // test rsi, rsi
	a.jump(je, "invalid")
	a.op(0x4c, 0x8d, 0x0d) // lea r9, [rip + table]
	a.address(at.text, at.ro)

	a.label("entry")
	a.op(0x4c, 0x8d, 0x15) // lea r10, [rip + end of table]
	a.address(at.text, tableEnd)
	a.op(0x4d, 0x39, 0xd1) // cmp r9, r10
	a.jump(je, "unknown")
	a.op(0x41, 0x8b, 0x01) // mov eax, [r9]: address of the name
	a.op(0x4c, 0x8d, 0x1d) // lea r11, [rip + start of file]
	a.address(at.text, 0)
	a.op(0x49, 0x01, 0xc3) // add r11, rax
	a.op(0x31, 0xc9)       // xor ecx, ecx

	a.label("letter")
	a.op(0x8a, 0x04, 0x0f)       // mov al, [rdi + rcx]
	a.op(0x41, 0x3a, 0x04, 0x0b) // cmp al, [r11 + rcx]
	a.jump(jne, "next")
	a.op(0x48, 0xff, 0xc1) // inc rcx
	a.op(0x84, 0xc0)       // test al, al
	a.jump(jne, "letter")

	a.op(0x41, 0x8b, 0x41, 0x04) // mov eax, [r9 + 4]: address of the function
	a.op(0x4c, 0x8d, 0x1d)       // lea r11, [rip + start of file]
	a.address(at.text, 0)
	a.op(0x4c, 0x01, 0xd8) // add rax, r11

	// From CUDA 12.0 on the name cuGetProcAddress means the function with five arguments; a
	// caller that got the older one would read a status that nobody wrote.
	a.op(0x4c, 0x8d, 0x1d) // lea r11, [rip + cuGetProcAddress]
	a.near("cuGetProcAddress")
	a.op(0x4c, 0x39, 0xd8) // cmp rax, r11
	a.jump(jne, "found")
	a.op(0x81, 0xfa) // cmp edx, 12000
	a.word(12000)
	a.jump(jl, "found")
	a.op(0x48, 0x8d, 0x05) // lea rax, [rip + cuGetProcAddress_v2]
	a.near("cuGetProcAddress_v2")

	a.label("found")
	a.op(0x48, 0x89, 0x06) // mov [rsi], rax
	a.op(0x4d, 0x85, 0xc0) // test r8, r8
	a.jump(je, "done")
	a.op(0x41, 0xc7, 0x00) // mov dword [r8], 0: CU_GET_PROC_ADDRESS_SUCCESS
	a.word(0)
	a.label("done")
	a.result(0)

	a.label("next")
	a.op(0x49, 0x83, 0xc1, 0x08) // add r9, 8
	a.jump(always, "entry")

	a.label("unknown")
	a.op(0x48, 0xc7, 0x06) // mov qword [rsi], 0
	a.word(0)
	a.op(0x4d, 0x85, 0xc0) // test r8, r8
	a.jump(je, "absent")
	a.op(0x41, 0xc7, 0x00) // mov dword [r8], 1: CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
	a.word(1)
	a.label("absent")
	a.result(notFound)
}

// The jumps in use, each with a distance of 32 bits.
const (
	je     = "\x0f\x84"
	jne    = "\x0f\x85"
	jl     = "\x0f\x8c"
	always = "\xe9"
)

// An assembler gathers machine code and fills in the distances to labels at the end.
type assembler struct {
	code   []byte
	at     map[string]int // offset of every label and function
	entry  map[string]int
	fixups []fixup
}

type fixup struct {
	at     int
	target string
}

func (a *assembler) op(b ...byte) { a.code = append(a.code, b...) }

func (a *assembler) word(v uint32) { a.code = binary.LittleEndian.AppendUint32(a.code, v) }

func (a *assembler) label(name string) { a.at[name] = len(a.code) }

// function begins an exported function.
func (a *assembler) function(name string) {
	a.entry[name] = len(a.code)
	a.label(name)
}

// result ends a function: mov eax, code; ret.
func (a *assembler) result(code uint32) {
	a.op(0xb8)
	a.word(code)
	a.op(0xc3)
}

func (a *assembler) jump(op, target string) {
	a.op([]byte(op)...)
	a.near(target)
}

// near ends an instruction with the distance to a label.
func (a *assembler) near(target string) {
	a.fixups = append(a.fixups, fixup{len(a.code), target})
	a.word(0)
}

// address ends an instruction with the distance to an address outside the code.
func (a *assembler) address(text, target int) {
	a.word(uint32(target - (text + len(a.code) + 4)))
}

func (a *assembler) finish() assembled {
	for _, f := range a.fixups {
		binary.LittleEndian.PutUint32(a.code[f.at:], uint32(a.at[f.target]-(f.at+4)))
	}
	return assembled{a.code, a.entry}
}
