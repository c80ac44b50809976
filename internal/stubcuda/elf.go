package stubcuda

import (
	"bytes"
	"debug/elf"
	_ "embed"
	"encoding/binary"
	"strings"
)

// SONAME is the file name and the name inside the library that Build writes.
const SONAME = "libcuda.so.1"

//go:embed names.txt
var namesText string

// page keeps segments of different rights on different pages: 4 KiB is what x86-64 maps.
const page = 0x1000

// Names lists the functions that the library exports, sorted.
func Names() []string { return strings.Fields(namesText) }

// Build returns the bytes of the library. They are always the same.
func Build() []byte {
	names := Names()

	// The layout is header, hash, symbols, strings and read-only data on the first pages; code on
	// its own; the dynamic section, which ld.so writes to, on the last. Everything has a file offset
	// equal to its address.
	strtab, nameAt := stringTable(append([]string{SONAME}, names...))
	const hashAt = headerSize
	hash := hashTable(names)
	symAt := align(hashAt+len(hash), 8)
	strAt := symAt + elf.Sym64Size*(len(names)+1)
	roAt := align(strAt+len(strtab), 16)

	textLen := len(assemble(names, layout{}).code) // sizes do not depend on addresses
	roLen := len(readOnly(names, layout{}, assembled{}))
	textAt := align(roAt+roLen, page)
	at := layout{names: strAt, nameAt: nameAt, ro: roAt, text: textAt}
	text := assemble(names, at)
	ro := readOnly(names, at, text)

	dynAt := align(textAt+textLen, page)
	dyn := dynamic(nameAt[SONAME], hashAt, symAt, strAt, len(strtab))

	sections := []section{
		{name: ".hash", kind: elf.SHT_HASH, at: hashAt, data: hash, link: 2, entry: 4},
		{name: ".dynsym", kind: elf.SHT_DYNSYM, at: symAt, link: 3, info: 1, entry: elf.Sym64Size,
			data: symbols(names, at, text)},
		{name: ".dynstr", kind: elf.SHT_STRTAB, at: strAt, data: strtab},
		{name: ".rodata", kind: elf.SHT_PROGBITS, at: roAt, data: ro},
		{name: ".text", kind: elf.SHT_PROGBITS, at: textAt, data: text.code, flags: elf.SHF_EXECINSTR},
		{name: ".dynamic", kind: elf.SHT_DYNAMIC, at: dynAt, data: dyn, link: 3, entry: 16,
			flags: elf.SHF_WRITE},
	}
	segments := []elf.Prog64{
		load(elf.PF_R, 0, roAt+len(ro)),
		load(elf.PF_R|elf.PF_X, textAt, len(text.code)),
		load(elf.PF_R|elf.PF_W, dynAt, len(dyn)),
		segment(elf.PT_DYNAMIC, elf.PF_R|elf.PF_W, dynAt, len(dyn), 8),
		// After relocation the dynamic section is read-only again.
		segment(elf.PT_GNU_RELRO, elf.PF_R, dynAt, page, 1),
		segment(elf.PT_GNU_STACK, elf.PF_R|elf.PF_W, 0, 0, 16),
	}
	return write(sections, segments)
}

// headerSize is the ELF header and the six program headers behind it.
const headerSize = 64 + segmentCount*56

const segmentCount = 6

// A section is one part of the file; at is both its offset and its address.
type section struct {
	name       string
	kind       elf.SectionType
	flags      elf.SectionFlag
	at         int
	data       []byte
	link, info uint32
	entry      int
}

// write lays the parts out in one file and appends the section headers, which ld.so does not
// read but every tool that a person would inspect the file with does.
func write(sections []section, segments []elf.Prog64) []byte {
	last := sections[len(sections)-1]
	names := []string{".shstrtab"}
	for _, s := range sections {
		names = append(names, s.name)
	}
	shstr, shstrAt := stringTable(names)
	sections = append(sections, section{name: ".shstrtab", kind: elf.SHT_STRTAB,
		at: last.at + len(last.data), data: shstr})
	headersAt := align(last.at+len(last.data)+len(shstr), 8)

	out := make([]byte, headersAt)
	ident := [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB),
		byte(elf.EV_CURRENT), byte(elf.ELFOSABI_NONE)}
	copy(out, encode(elf.Header64{
		Ident: ident, Type: uint16(elf.ET_DYN), Machine: uint16(elf.EM_X86_64),
		Version: uint32(elf.EV_CURRENT), Phoff: 64, Shoff: uint64(headersAt), Ehsize: 64,
		Phentsize: 56, Phnum: uint16(len(segments)), Shentsize: 64,
		Shnum: uint16(len(sections) + 1), Shstrndx: uint16(len(sections)),
	}))
	copy(out[64:], encode(segments))

	headers := []elf.Section64{{}}
	for _, s := range sections {
		copy(out[s.at:], s.data)
		h := elf.Section64{Name: shstrAt[s.name], Type: uint32(s.kind), Flags: uint64(s.flags),
			Off: uint64(s.at), Size: uint64(len(s.data)), Link: s.link, Info: s.info,
			Addralign: 1, Entsize: uint64(s.entry)}
		if s.name != ".shstrtab" { // the one section that is not mapped
			h.Flags |= uint64(elf.SHF_ALLOC)
			h.Addr = uint64(s.at)
			h.Addralign = 8
		}
		headers = append(headers, h)
	}
	return append(out, encode(headers)...)
}

func load(flags elf.ProgFlag, at, size int) elf.Prog64 {
	return segment(elf.PT_LOAD, flags, at, size, page)
}

func segment(kind elf.ProgType, flags elf.ProgFlag, at, size, alignment int) elf.Prog64 {
	return elf.Prog64{Type: uint32(kind), Flags: uint32(flags), Off: uint64(at), Vaddr: uint64(at),
		Paddr: uint64(at), Filesz: uint64(size), Memsz: uint64(size), Align: uint64(alignment)}
}

// textSection is the index of .text in the list of sections, counting the empty first one.
const textSection = 5

// symbols writes the dynamic symbol table: the empty symbol, then the names in order.
func symbols(names []string, at layout, text assembled) []byte {
	table := []elf.Sym64{{}}
	for _, name := range names {
		table = append(table, elf.Sym64{Name: at.nameAt[name], Shndx: textSection,
			Info:  elf.ST_INFO(elf.STB_GLOBAL, elf.STT_FUNC),
			Value: uint64(at.text + text.offset(name))})
	}
	return encode(table)
}

func dynamic(soname uint32, hashAt, symAt, strAt, strLen int) []byte {
	return encode([]elf.Dyn64{
		{Tag: int64(elf.DT_SONAME), Val: uint64(soname)},
		{Tag: int64(elf.DT_HASH), Val: uint64(hashAt)},
		{Tag: int64(elf.DT_SYMTAB), Val: uint64(symAt)},
		{Tag: int64(elf.DT_STRTAB), Val: uint64(strAt)},
		{Tag: int64(elf.DT_STRSZ), Val: uint64(strLen)},
		{Tag: int64(elf.DT_SYMENT), Val: elf.Sym64Size},
		{Tag: int64(elf.DT_NULL)},
	})
}

// hashTable writes the hash table of the System V ABI, chapter 5, over the symbols in order.
func hashTable(names []string) []byte {
	const buckets = 257 // a prime near the number of names over three
	table := make([]uint32, 2+buckets+len(names)+1)
	table[0], table[1] = buckets, uint32(len(names)+1)
	bucket, chain := table[2:2+buckets], table[2+buckets:]
	for i, name := range names {
		b := sysvHash(name) % buckets
		chain[i+1] = bucket[b]
		bucket[b] = uint32(i + 1)
	}
	return encode(table)
}

func sysvHash(name string) uint32 {
	var h uint32
	for _, c := range []byte(name) {
		h = h<<4 + uint32(c)
		h ^= h >> 28 << 4
		h &^= 0xf0000000
	}
	return h
}

// stringTable joins names with a NUL between them and says where each begins.
func stringTable(names []string) ([]byte, map[string]uint32) {
	table := []byte{0}
	at := make(map[string]uint32, len(names))
	for _, name := range names {
		at[name] = uint32(len(table))
		table = append(append(table, name...), 0)
	}
	return table, at
}

// encode writes values of fixed size in the byte order of x86-64.
func encode(v any) []byte {
	var b bytes.Buffer
	// Write to a buffer fails only on a type without a fixed size, which every test would see.
	_ = binary.Write(&b, binary.LittleEndian, v)
	return b.Bytes()
}

func align(n, to int) int { return (n + to - 1) / to * to }
